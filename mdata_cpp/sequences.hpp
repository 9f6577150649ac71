// Where sequences and documents are in the tokens of a store, from the tables of its .idx files.
//
// The tables are read in place (they begin at byte 34, so nothing in them is aligned), and only the entries that a
// result needs: no pass over them, no copy. Each entry that is used is checked against the shard's bounds, whatever was
// checked before, so that a wrong table is an IndexFault and never a position outside the store. Tokens and documents
// are numbered over all shards, in order.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

namespace mdata {

// The tables of one shard: int32 lengths and int64 pointers (bytes) of its sequences, int64 boundaries of its documents.
struct ShardTables {
    const std::byte* lengths = nullptr;
    const std::byte* pointers = nullptr;
    const std::byte* boundaries = nullptr;
    std::int64_t num_sequences = 0;
    std::int64_t num_documents = 0;
    std::int64_t num_tokens = 0;
};

// An entry that cannot be: of which shard, which table, at which place.
struct IndexFault : std::runtime_error {
    IndexFault(std::size_t in_shard, const char* of_table, std::int64_t at_entry)
        : std::runtime_error("a bad entry of an index"), shard(in_shard), table(of_table), entry(at_entry) {}
    std::size_t shard;
    const char* table;
    std::int64_t entry;
};

// Runs of tokens, row after row: row i has the runs up to ends[i].
struct Runs {
    std::vector<std::int64_t> ends, first, count;
};

// Where documents begin inside rows: row i has the places up to ends[i], ascending, none of them 0.
struct Cuts {
    std::vector<std::int64_t> ends;
    std::vector<std::int32_t> places;
};

class SequenceIndex {
public:
    SequenceIndex(std::int64_t item_size, std::vector<ShardTables> shards) : shards_(std::move(shards)) {
        if (item_size < 1 || item_size > 8 || !std::has_single_bit(static_cast<std::uint64_t>(item_size))) {
            throw std::invalid_argument("tokens of 1, 2, 4 or 8 bytes");
        }
        item_bits_ = std::countr_zero(static_cast<std::uint64_t>(item_size));
        std::int64_t tokens = 0, sequences = 0, documents = 0;
        for (const ShardTables& shard : shards_) {
            constexpr std::int64_t kMost = std::int64_t{1} << 60;
            const auto add = [&](std::int64_t& sum, std::int64_t count) {
                if (count < 0 || count > kMost - sum) throw std::overflow_error("a negative number, or more than 2^60");
                sum += count;
            };
            add(tokens, shard.num_tokens);
            add(sequences, shard.num_sequences);
            add(documents, shard.num_documents);
            token_ends_.push_back(tokens);
            sequence_ends_.push_back(sequences);
            document_ends_.push_back(documents);
        }
    }

    std::int64_t num_tokens() const { return shards_.empty() ? 0 : token_ends_.back(); }
    std::int64_t num_sequences() const { return shards_.empty() ? 0 : sequence_ends_.back(); }

    // The first token of a sequence; for the number of sequences, the number of tokens. For pairs whose sequences follow
    // each other in .bin, as the two below.
    std::int64_t first_token(std::int64_t number) const {
        if (number == num_sequences()) return num_tokens();
        const auto [shard, inside] = part_of(sequence_ends_, number);
        return tokens_before(shard) + pointer(shard, inside);
    }

    // Calls use(length) for each of sequences [first, last).
    template <typename Use>
    void lengths(std::int64_t first, std::int64_t last, Use use) const {
        while (first < last) {
            const auto [shard, inside] = part_of(sequence_ends_, first);
            const std::int64_t count = std::min(last - first, shards_[shard].num_sequences - inside);
            for (std::int64_t i = inside; i < inside + count; ++i) {
                const std::int64_t length = entry<std::int32_t>(shards_[shard].lengths, i);
                if (length < 0) throw IndexFault(shard, "length", i);
                use(length);
            }
            first += count;
        }
    }

    // Says that lengths and pointers do not fit each other from a sequence on.
    [[noreturn]] void bad_length(std::int64_t number) const {
        const auto [shard, inside] = part_of(sequence_ends_, number);
        throw IndexFault(shard, "length", inside);
    }

    // Starts of documents inside of the tokens (starts[i], starts[i] + counts[i]), relative to starts[i]. Documents
    // without tokens make no cut. For pairs whose sequences follow each other in .bin.
    Cuts cuts(std::span<const std::int64_t> starts, std::span<const std::int64_t> counts) const {
        if (starts.size() != counts.size()) throw std::invalid_argument("starts and counts differ in number");
        std::vector<Search> searches(starts.size());
        for (std::size_t i = 0; i < starts.size(); ++i) {
            if (starts[i] < 0 || counts[i] < 0 || starts[i] > num_tokens() || counts[i] > num_tokens() - starts[i] ||
                counts[i] > std::numeric_limits<std::int32_t>::max()) {
                throw std::out_of_range("tokens outside of the shards");
            }
            searches[i] = begin_search(starts[i]);
        }
        // The rows' searches take their steps side by side, so that they wait for memory together.
        for (int round = 0; round < kRounds; ++round) {
            for (Search& search : searches) step(search);
        }
        Cuts found;
        found.ends.reserve(starts.size());
        for (std::size_t i = 0; i < starts.size(); ++i) {
            cut_row(searches[i], starts[i], counts[i], found.places);
            found.ends.push_back(static_cast<std::int64_t>(found.places.size()));
        }
        return found;
    }

    // The runs of samples of Megatron's order: spans[4 i ..] = (d0, o0, d1, o1): from offset o0 of the sequence at
    // place d0 of `order` to offset o1 + extra of that at d1.
    template <typename Place>
    Runs pieces(std::span<const Place> order, std::span<const std::int64_t> spans, std::int64_t extra) const {
        if (spans.size() % 4 != 0 || extra < 0 || extra > 1) throw std::invalid_argument("spans of four numbers, extra 0 or 1");
        Runs runs;
        runs.ends.reserve(spans.size() / 4);
        for (std::size_t i = 0; i < spans.size(); i += 4) {
            const std::int64_t d0 = spans[i], o0 = spans[i + 1], d1 = spans[i + 2], o1 = spans[i + 3];
            if (d0 < 0 || d1 < d0 || static_cast<std::uint64_t>(d1) >= order.size()) {
                throw std::out_of_range("a sample outside of the order");
            }
            for (std::int64_t d = d0; d <= d1; ++d) {
                const auto [start, length] = sequence(static_cast<std::int64_t>(order[static_cast<std::size_t>(d)]));
                const std::int64_t from = d == d0 ? o0 : 0;
                const std::int64_t to = d == d1 ? o1 + extra : length;
                if (from < 0 || to < from || to > length) throw std::out_of_range("a sample outside of its sequence");
                runs.first.push_back(start + from);
                runs.count.push_back(to - from);
            }
            runs.ends.push_back(static_cast<std::int64_t>(runs.first.size()));
        }
        return runs;
    }

    // First token and number of tokens of documents, for pairs whose sequences follow each other.
    void documents(std::span<const std::int64_t> numbers, std::span<std::int64_t> first, std::span<std::int64_t> count) const {
        for (std::size_t i = 0; i < numbers.size(); ++i) {
            const auto [shard, inside] = part_of(document_ends_, numbers[i]);
            const std::int64_t start = start_of(shard, inside);
            const std::int64_t stop = start_of(shard, inside + 1);
            if (stop < start) throw IndexFault(shard, "boundary", inside);
            first[i] = tokens_before(shard) + start;
            count[i] = stop - start;
        }
    }

    // For each token of the runs [starts[i], starts[i] + counts[i]), one run after another: 1 where its sequence has an odd
    // number in its document (from 0), else 0. For pairs whose sequences follow each other in .bin.
    std::vector<std::uint8_t> odd_sequences(std::span<const std::int64_t> starts, std::span<const std::int64_t> counts) const {
        if (starts.size() != counts.size()) throw std::invalid_argument("starts and counts differ in number");
        std::vector<std::uint8_t> odd;
        for (std::size_t i = 0; i < starts.size(); ++i) {
            if (starts[i] < 0 || counts[i] < 0 || starts[i] > num_tokens() || counts[i] > num_tokens() - starts[i]) {
                throw std::out_of_range("tokens outside of the shards");
            }
            const std::int64_t stop = starts[i] + counts[i];
            for (std::int64_t at = starts[i]; at < stop;) at = mark_odd(at, stop, odd);
        }
        return odd;
    }

private:
    template <typename T>
    static T entry(const std::byte* table, std::int64_t i) {
        T value;
        std::memcpy(&value, table + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
        return value;
    }

    std::int64_t tokens_before(std::size_t shard) const { return token_ends_[shard] - shards_[shard].num_tokens; }

    // (shard, number inside of it)
    std::pair<std::size_t, std::int64_t> part_of(const std::vector<std::int64_t>& ends, std::int64_t number) const {
        if (ends.empty() || number < 0 || number >= ends.back()) throw std::out_of_range("a number outside of the shards");
        const auto shard = static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), number) - ends.begin());
        return {shard, shard == 0 ? number : number - ends[shard - 1]};
    }

    std::int64_t pointer(std::size_t shard, std::int64_t sequence) const {
        const std::int64_t byte = entry<std::int64_t>(shards_[shard].pointers, sequence);
        const std::int64_t token = byte >> item_bits_;
        if (byte < 0 || token << item_bits_ != byte || token > shards_[shard].num_tokens) throw IndexFault(shard, "pointer", sequence);
        return token;
    }

    // (first token in the store, length)
    std::pair<std::int64_t, std::int64_t> sequence(std::int64_t number) const {
        const auto [shard, inside] = part_of(sequence_ends_, number);
        const std::int64_t length = entry<std::int32_t>(shards_[shard].lengths, inside);
        const std::int64_t start = pointer(shard, inside);
        if (length < 0 || length > shards_[shard].num_tokens - start) throw IndexFault(shard, "length", inside);
        return {tokens_before(shard) + start, length};
    }

    // The first token of a document inside its shard; for the number of documents, the number of tokens.
    std::int64_t start_of(std::size_t shard, std::int64_t document) const {
        const ShardTables& tables = shards_[shard];
        const std::int64_t sequence = entry<std::int64_t>(tables.boundaries, document);
        if (sequence < 0 || sequence > tables.num_sequences) throw IndexFault(shard, "boundary", document);
        return sequence == tables.num_sequences ? tables.num_tokens : pointer(shard, sequence);
    }

    // For the last document of a shard that begins at a token or before it: low begins there or before (-1: none does),
    // high behind it. Lengths are much alike, so a guess in proportion is near, and one from there nearer.
    struct Search {
        std::size_t shard = 0;
        std::int64_t token = 0;
        std::int64_t low = -1, high = 0, guess = 0;
        double density = 0;  // documents a token
    };
    static constexpr int kRounds = 4;

    Search begin_search(std::int64_t token) const {
        Search search;
        search.shard = static_cast<std::size_t>(std::upper_bound(token_ends_.begin(), token_ends_.end(), token) - token_ends_.begin());
        if (search.shard == shards_.size()) return search;
        const ShardTables& tables = shards_[search.shard];
        search.token = token - tokens_before(search.shard);
        search.high = tables.num_documents;
        search.density = static_cast<double>(tables.num_documents) / static_cast<double>(tables.num_tokens);
        search.guess = static_cast<std::int64_t>(static_cast<double>(search.token) * search.density);
        ask_for(search);
        return search;
    }

    void ask_for(const Search& search) const {
        const auto at = static_cast<std::size_t>(search.guess) * 8;
        __builtin_prefetch(shards_[search.shard].boundaries + at);
        __builtin_prefetch(shards_[search.shard].pointers + at);
    }

    void step(Search& search) const {
        if (search.guess <= search.low || search.guess >= search.high) return;
        const std::int64_t error = search.token - start_of(search.shard, search.guess);
        (error >= 0 ? search.low : search.high) = search.guess;
        const auto away = static_cast<std::int64_t>(static_cast<double>(error) * search.density);
        search.guess += away == 0 ? (error >= 0 ? 1 : -1) : away;
        if (search.guess > search.low && search.guess < search.high) ask_for(search);
    }

    // By steps that grow away from the last guess, then by halves.
    std::int64_t end_search(Search& search) const {
        const auto before = [&](std::int64_t document) {
            const bool is = start_of(search.shard, document) <= search.token;
            (is ? search.low : search.high) = document;
            return is;
        };
        const bool upward = search.guess > search.low;
        for (std::int64_t away = 1; upward && search.high - search.low > away && before(search.low + away);) away *= 2;
        for (std::int64_t away = 1; !upward && search.high - search.low > away && !before(search.high - away);) away *= 2;
        while (search.high - search.low > 1) before(search.low + (search.high - search.low) / 2);
        return search.low;
    }

    // As `odd_sequences`, for the document that holds token `at`, up to its end or `stop`; where that is.
    std::int64_t mark_odd(std::int64_t at, std::int64_t stop, std::vector<std::uint8_t>& odd) const {
        Search search = begin_search(at);
        for (int round = 0; round < kRounds; ++round) step(search);
        const std::int64_t document = end_search(search);
        const std::size_t shard = search.shard;
        if (document < 0) throw IndexFault(shard, "boundary", 0);
        const std::int64_t before = tokens_before(shard);
        const std::int64_t end = before + start_of(shard, document + 1);
        const std::int64_t first = entry<std::int64_t>(shards_[shard].boundaries, document);
        const std::int64_t last = entry<std::int64_t>(shards_[shard].boundaries, document + 1);
        const std::int64_t limit = std::min(stop, end);
        std::int64_t place = at;
        for (std::int64_t sequence = first; sequence < last && place < limit; ++sequence) {
            const std::int64_t next = std::min(sequence + 1 < last ? before + pointer(shard, sequence + 1) : end, limit);
            if (next <= place) continue;
            odd.insert(odd.end(), static_cast<std::size_t>(next - place), static_cast<std::uint8_t>((sequence - first) % 2));
            place = next;
        }
        if (place == at) throw IndexFault(shard, "boundary", document);
        return place;
    }

    void cut_row(Search& search, std::int64_t start, std::int64_t count, std::vector<std::int32_t>& places) const {
        std::int64_t last = 0;  // the newest cut
        for (std::size_t shard = search.shard; shard < shards_.size() && tokens_before(shard) < start + count; ++shard) {
            // In a further shard document 0 begins with it.
            std::int64_t document = shard == search.shard ? end_search(search) + 1 : 0;
            for (; document < shards_[shard].num_documents; ++document) {
                const std::int64_t place = tokens_before(shard) + start_of(shard, document) - start;
                if (place >= count) break;
                if (place < last) throw IndexFault(shard, "boundary", document);
                if (place > last) places.push_back(static_cast<std::int32_t>(place));
                last = place;
            }
        }
    }

    int item_bits_ = 0;  // a division for each entry would cost more than finding it
    std::vector<ShardTables> shards_;
    std::vector<std::int64_t> token_ends_, sequence_ends_, document_ends_;  // running sums
};

}  // namespace mdata
