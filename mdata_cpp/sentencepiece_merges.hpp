// SentencePiece's BPE inside one word: the adjacent pair with the highest score that forms a piece is merged first, the
// leftmost of equals, until none is left.
//
// Characters and pieces are symbols, small numbers; a table gives for two symbols the result of merging them and its
// priority. Short words are searched repeatedly, long ones use a heap, so that a word of n characters never takes more
// than O(n log n).
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <map>
#include <queue>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "sentencepiece_text.hpp"

namespace mdata::sp {

inline std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a ^ 0x9E3779B97F4A7C15) * (b ^ 0xD6E8FEB86659FD93);
    return static_cast<std::uint64_t>(product >> 64) ^ static_cast<std::uint64_t>(product);
}

// From 64-bit keys, never kNoKey, to values; filled once.
template <typename Value>
class FlatMap {
   public:
    static constexpr std::uint64_t kNoKey = ~std::uint64_t{0};

    FlatMap() : slots_(1, {kNoKey, {}}) {}
    explicit FlatMap(std::size_t count) : slots_(std::bit_ceil(2 * count + 1), {kNoKey, {}}) {}

    void insert(std::uint64_t key, Value value) { slots_[find(key)] = {key, value}; }

    void prefetch(std::uint64_t key) const { __builtin_prefetch(&slots_[mixed(key, key) & (slots_.size() - 1)]); }

    const Value* get(std::uint64_t key) const {
        const Slot& slot = slots_[find(key)];
        return slot.key == key ? &slot.value : nullptr;
    }

   private:
    struct Slot {
        std::uint64_t key;
        Value value;
    };

    std::size_t find(std::uint64_t key) const {
        const std::size_t mask = slots_.size() - 1;
        std::size_t at = mixed(key, key) & mask;
        while (slots_[at].key != kNoKey && slots_[at].key != key) at = (at + 1) & mask;
        return at;
    }

    std::vector<Slot> slots_;
};

struct Piece {
    std::string text;  // as prepared text writes it
    float score = 0;
    std::int32_t id = 0;
};

class Merges {
   public:
    static constexpr std::uint32_t kUnknown = 0xFFFFFFFF;  // a character that is in no piece
    static constexpr std::int32_t kNoPiece = -1;

    // Pieces that can be made by joining; texts differ and are not empty.
    explicit Merges(const std::vector<Piece>& pieces) {
        std::unordered_map<std::string_view, std::uint32_t> symbols;
        for (const Piece& piece : pieces) {
            symbols.emplace(piece.text, static_cast<std::uint32_t>(ids_.size()));
            ids_.push_back(piece.id);
        }
        std::vector<std::pair<std::uint32_t, std::uint32_t>> characters;
        for (const Piece& piece : pieces) add_characters(piece.text, symbols, characters);
        characters_ = FlatMap<std::uint32_t>(characters.size());
        for (const auto& [character, symbol] : characters) {
            characters_.insert(character, symbol);
            if (character < 0x80) ascii_[character] = symbol;
        }
        add_pairs(pieces, symbols);
        add_joints(pieces);
    }

    // Whether some piece has these two characters, as `first_char` gives them, side by side; may be wrong with "yes".
    bool may_join(std::uint32_t left, std::uint32_t right) const {
        if ((left | right) < 0x80) return ascii_joints_[2 * left + (right >> 6)] >> (right & 63) & 1;
        const std::uint64_t bit = joint_bit(pair_key(left, right));
        return joints_[bit >> 6] >> (bit & 63) & 1;
    }

    // The id of a character as `first_char` gives it; kNoPiece: it is no piece.
    std::int32_t id_of_char(std::uint32_t character) const { return id_of(symbol_of(character)); }

    // Call `out(id, start, stop)` for each symbol that is left of a word, in order; id kNoPiece: no piece.
    template <typename Out>
    void encode(std::string_view word, Out&& out) const {
        if (word.size() <= kShort) {
            encode_short(word, out);
        } else {
            encode_long(word, out);
        }
    }

   private:
    static constexpr std::size_t kShort = 48;
    static constexpr std::uint32_t kNever = 0xFFFFFFFF;

    struct Merge {
        std::uint32_t rank = kNever;
        std::uint32_t symbol = 0;
    };

    using Symbols = std::unordered_map<std::string_view, std::uint32_t>;

    void add_characters(std::string_view text, Symbols& symbols,
                        std::vector<std::pair<std::uint32_t, std::uint32_t>>& characters) {
        while (!text.empty()) {
            std::size_t size = 0;
            const std::uint32_t character = first_char(text, size);
            const auto [found, is_new] = symbols.try_emplace(text.substr(0, size), static_cast<std::uint32_t>(ids_.size()));
            if (is_new) ids_.push_back(kNoPiece);
            if (known_.size() < ids_.size()) known_.resize(ids_.size());
            if (!known_[found->second]) characters.emplace_back(character, found->second);
            known_[found->second] = true;
            text.remove_prefix(size);
        }
    }

    void add_pairs(const std::vector<Piece>& pieces, const Symbols& symbols) {
        std::map<float, std::uint32_t, std::greater<>> ranks;
        for (const Piece& piece : pieces) ranks.emplace(piece.score, 0);
        std::uint32_t next = 0;
        for (auto& [score, rank] : ranks) rank = next++;
        std::vector<std::pair<std::uint64_t, Merge>> pairs;
        for (const Piece& piece : pieces) {
            const std::string_view text = piece.text;
            const Merge merge = {ranks.find(piece.score)->second, symbols.find(text)->second};
            for (std::size_t at = char_length(text[0]); at < text.size(); at += char_length(text[at])) {
                const auto left = symbols.find(text.substr(0, at)), right = symbols.find(text.substr(at));
                if (left != symbols.end() && right != symbols.end())
                    pairs.emplace_back(pair_key(left->second, right->second), merge);
            }
        }
        pairs_ = FlatMap<Merge>(pairs.size());
        for (const auto& [key, merge] : pairs) pairs_.insert(key, merge);
    }

    void add_joints(const std::vector<Piece>& pieces) {
        std::vector<std::uint64_t> wide;  // pairs that are not both ASCII
        for (const Piece& piece : pieces) {
            std::string_view text = piece.text;
            std::size_t size = 0;
            std::uint32_t left = first_char(text, size);
            for (text.remove_prefix(size); !text.empty(); text.remove_prefix(size)) {
                const std::uint32_t right = first_char(text, size);
                if ((left | right) < 0x80) {
                    ascii_joints_[2 * left + (right >> 6)] |= std::uint64_t{1} << (right & 63);
                } else {
                    wide.push_back(pair_key(left, right));
                }
                left = right;
            }
        }
        std::sort(wide.begin(), wide.end());
        wide.erase(std::unique(wide.begin(), wide.end()), wide.end());
        // With 16 to 32 bits for each pair 3 to 6 of 100 others look like one.
        joint_shift_ = 64 - std::max(static_cast<int>(std::bit_width(16 * wide.size())), 6);
        joints_.assign(std::size_t{1} << (64 - joint_shift_ - 6), 0);
        for (const std::uint64_t key : wide) {
            const std::uint64_t bit = joint_bit(key);
            joints_[bit >> 6] |= std::uint64_t{1} << (bit & 63);
        }
    }

    std::uint64_t joint_bit(std::uint64_t key) const { return (key * 0x9E3779B97F4A7C15) >> joint_shift_; }
    static std::uint64_t pair_key(std::uint32_t left, std::uint32_t right) {
        return std::uint64_t{left} << 32 | right;
    }

    std::uint32_t symbol_of(std::uint32_t character) const {
        if (character < 0x80) return ascii_[character];
        const std::uint32_t* found = characters_.get(character);
        return found == nullptr ? kUnknown : *found;
    }

    Merge merge_of(std::uint32_t left, std::uint32_t right) const {
        if (left == kUnknown || right == kUnknown) return {};
        const Merge* found = pairs_.get(pair_key(left, right));
        return found == nullptr ? Merge{} : *found;
    }

    std::int32_t id_of(std::uint32_t symbol) const { return symbol == kUnknown ? kNoPiece : ids_[symbol]; }

    template <typename Out>
    void encode_short(std::string_view word, Out&& out) const {
        std::array<std::uint32_t, kShort> symbols;
        std::array<std::uint32_t, kShort + 1> starts;
        std::array<Merge, kShort> merges;  // merges[i]: of symbols i and i + 1
        std::size_t count = 0;
        for (std::size_t at = 0, size = 0; at < word.size(); at += size) {
            symbols[count] = symbol_of(first_char(word.substr(at), size));
            starts[count] = static_cast<std::uint32_t>(at);
            if (count > 0) pairs_.prefetch(pair_key(symbols[count - 1], symbols[count]));
            ++count;
        }
        for (std::size_t i = 0; i + 1 < count; ++i) merges[i] = merge_of(symbols[i], symbols[i + 1]);
        starts[count] = static_cast<std::uint32_t>(word.size());
        while (count > 1) {
            std::size_t best = 0;
            for (std::size_t i = 1; i + 1 < count; ++i)
                if (merges[i].rank < merges[best].rank) best = i;
            if (merges[best].rank == kNever) break;
            symbols[best] = merges[best].symbol;
            --count;
            for (std::size_t i = best + 1; i < count; ++i) {
                symbols[i] = symbols[i + 1];
                starts[i] = starts[i + 1];
                merges[i - 1] = merges[i];
            }
            starts[count] = static_cast<std::uint32_t>(word.size());
            if (best > 0) merges[best - 1] = merge_of(symbols[best - 1], symbols[best]);
            if (best + 1 < count) merges[best] = merge_of(symbols[best], symbols[best + 1]);
        }
        for (std::size_t i = 0; i < count; ++i) out(id_of(symbols[i]), starts[i], starts[i + 1]);
    }

    // A symbol in a chain; `merge` is that with the next one. Gone: next is kGone.
    struct Link {
        std::uint32_t symbol, start, previous, next;
        Merge merge;
    };
    static constexpr std::uint32_t kGone = 0xFFFFFFFE, kEnd = 0xFFFFFFFF;

    template <typename Out>
    void encode_long(std::string_view word, Out&& out) const {
        if (word.size() >= kGone) throw std::overflow_error("a word of 4 GiB or more");
        std::vector<Link> chain;
        std::vector<std::uint64_t> waiting;  // rank and place
        for (std::size_t at = 0, size = 0; at < word.size(); at += size) {
            const auto place = static_cast<std::uint32_t>(chain.size());
            chain.push_back({symbol_of(first_char(word.substr(at), size)), static_cast<std::uint32_t>(at), place - 1,
                             place + 1, {}});
        }
        chain.back().next = kEnd;
        for (std::uint32_t place = 0; place + 1 < chain.size(); ++place) {
            chain[place].merge = merge_of(chain[place].symbol, chain[place + 1].symbol);
            if (chain[place].merge.rank != kNever) waiting.push_back(pair_key(chain[place].merge.rank, place));
        }
        std::priority_queue agenda(std::greater<>{}, std::move(waiting));
        const auto look = [&](std::uint32_t place) {
            Link& link = chain[place];
            link.merge = link.next == kEnd ? Merge{} : merge_of(link.symbol, chain[link.next].symbol);
            if (link.merge.rank != kNever) agenda.push(pair_key(link.merge.rank, place));
        };
        while (!agenda.empty()) {
            const auto rank = static_cast<std::uint32_t>(agenda.top() >> 32);
            const auto place = static_cast<std::uint32_t>(agenda.top());
            agenda.pop();
            Link& link = chain[place];
            // An entry whose pair is no more; one with the rank of a newer pair is as good as that pair's own.
            if (link.next == kGone || link.merge.rank != rank) continue;
            link.symbol = link.merge.symbol;
            const std::uint32_t taken = link.next;
            link.next = chain[taken].next;
            chain[taken].next = kGone;
            if (link.next != kEnd) chain[link.next].previous = place;
            look(place);
            if (place != 0) look(link.previous);
        }
        for (std::uint32_t place = 0; place != kEnd;) {
            const Link& link = chain[place];
            out(id_of(link.symbol), link.start, link.next == kEnd ? word.size() : chain[link.next].start);
            place = link.next;
        }
    }

    std::vector<std::int32_t> ids_;  // of each symbol
    std::vector<bool> known_;        // symbols whose character is listed; used while building
    FlatMap<std::uint32_t> characters_;
    std::array<std::uint32_t, 0x80> ascii_ = filled();
    FlatMap<Merge> pairs_;
    std::array<std::uint64_t, 0x100> ascii_joints_{};
    std::vector<std::uint64_t> joints_;
    int joint_shift_ = 58;

    static constexpr std::array<std::uint32_t, 0x80> filled() {
        std::array<std::uint32_t, 0x80> all{};
        all.fill(kUnknown);
        return all;
    }
};

}  // namespace mdata::sp
