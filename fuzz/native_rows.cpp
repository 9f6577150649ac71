// Batches of the native order in one call (mdata_cpp/native_rows.hpp): any index, samples, epoch, block and rules.
//
// The bytes become the tokens of a store, the tables of an index that fits them or of any content, a permutation, and a
// request. It is refused by an exception or gives what a walk token by token gives: text, loss, positions and where
// documents begin. A request that fits is not refused. Buffers have just their size, for the sanitizers.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "input.hpp"
#include "native_rows.hpp"

namespace {

using Numbers = std::vector<std::int64_t>;
using Bytes = std::vector<std::byte>;

template <typename T>
Bytes bytes_of(const std::vector<T>& values) {
    Bytes bytes(values.size() * sizeof(T));
    if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
}

// One shard; of a sound one each sequence ends at `ends`, and each second document has two of them.
struct Tables {
    Bytes lengths, pointers, boundaries;
    Numbers ends, document_ends;
    std::int64_t num_tokens = 0;
    bool sound = false;

    explicit Tables(ByteSource& input) : sound((input.byte() & 3) != 0) {
        std::vector<std::int32_t> sizes(input.byte() % 20);
        Numbers at, first;
        for (auto& size : sizes) {
            size = sound ? input.byte() % 16 : static_cast<std::int32_t>(input.number());
            at.push_back(sound ? num_tokens : input.number());
            if (at.size() % 3 != 0) {
                first.push_back(sound ? static_cast<std::int64_t>(at.size()) - 1 : input.number());
                if (num_tokens > 0) document_ends.push_back(num_tokens);
            }
            if (sound) ends.push_back(num_tokens += size);
        }
        if (!sound) num_tokens = input.byte();
        first.push_back(static_cast<std::int64_t>(sizes.size()));
        lengths = bytes_of(sizes);
        pointers = bytes_of(at);
        boundaries = bytes_of(first);
    }

    mdata::SequenceIndex index() const {
        const auto sequences = static_cast<std::int64_t>(lengths.size() / 4);
        const auto documents = static_cast<std::int64_t>(boundaries.size() / 8) - 1;
        return {1, {{lengths.data(), pointers.data(), boundaries.data(), sequences, documents, num_tokens}}};
    }
};

struct Request {
    std::vector<std::int64_t> samples;
    mdata::EpochRows epoch;
    mdata::RowRules rules;
    std::size_t width;
    std::vector<std::int64_t> text, positions;
    std::vector<float> loss;

    explicit Request(ByteSource& input) {
        samples = input.numbers(5);
        epoch = {input.number(), input.number(), input.number(), nullptr, {static_cast<std::uint64_t>(input.number()), 1}};
        width = 1 + input.byte() % 24;
        const std::uint8_t flags = input.byte();
        rules = {.mask_eod = (flags & 1) != 0, .restart_at_eod = (flags & 2) != 0, .apart = (flags & 4) != 0};
        if (flags & 8) rules.pad = input.byte() % 8;
        if (flags & 16) rules.eod = input.byte() % 8;
        text.assign(samples.size() * width, -7);
        if (flags & 32) loss.assign(samples.size() * (width - 1), -7.0F);
        if (flags & 64) positions.assign(samples.size() * (width - 1), -7);
    }

    mdata::RowArrays rows() { return {text, width, loss, positions}; }
};

// What is read, one token after another, and where sequences or documents begin in it; the first token is number `begin`.
struct Stream {
    Numbers tokens;
    std::set<std::int64_t> starts;
    std::int64_t begin = 0;

    bool has(std::int64_t start, std::int64_t count) const {
        const auto size = static_cast<std::int64_t>(tokens.size());
        return start >= begin && start < begin + size && count >= 0 && count <= begin + size - start;
    }
};

Stream permuted(const Stream& file, const Tables& tables, const mdata::BlockShuffle& blocks, mdata::Key128 key, std::size_t first,
                std::size_t last) {
    const auto end_of = [&](std::size_t sequence) { return sequence == 0 ? 0 : tables.ends[sequence - 1]; };
    Stream made{Numbers(static_cast<std::size_t>(end_of(last) - end_of(first)), -1), {}, end_of(first)};
    for (std::size_t sequence = first; sequence < last; ++sequence) {
        const std::int64_t tokens = end_of(sequence + 1) - end_of(sequence);
        if (tokens == 0) continue;
        const auto [place, size] = blocks.place(key, static_cast<std::int64_t>(sequence));
        REQUIRE(size == tokens && made.has(place, size));
        std::copy_n(file.tokens.begin() + end_of(sequence), size, made.tokens.begin() + (place - made.begin));
        made.starts.insert(place);
    }
    REQUIRE(std::count(made.tokens.begin(), made.tokens.end(), -1) == 0);
    return made;
}

// Row `i` against the stream, from token `start` on; adds where documents begin to `documents`.
void check_row(const Request& request, const Stream& stream, std::size_t i, std::int64_t start, bool indexed,
               std::set<std::int64_t>& documents) {
    const auto& rules = request.rules;
    const std::size_t inputs = request.width - 1;
    const std::int64_t count = request.epoch.count;
    Numbers raw(request.width, 0);
    std::copy_n(stream.tokens.begin() + (start - stream.begin), count, raw.begin());
    const auto is_cut = [&](std::size_t j) {
        const auto place = static_cast<std::int64_t>(j);
        return indexed && j > 0 && j < inputs && place < count && stream.starts.contains(start + place);
    };
    std::int64_t position = 0;
    for (std::size_t j = 0; j < request.width; ++j) {
        REQUIRE(request.text[i * request.width + j] == (rules.pad == raw[j] ? 0 : raw[j]));
        if (j == inputs) break;
        const bool by_eod = rules.restart_at_eod && rules.eod;
        if (by_eod ? j > 0 && raw[j - 1] == *rules.eod : is_cut(j)) position = 0;
        if (!request.positions.empty()) REQUIRE(request.positions[i * inputs + j] == position);
        ++position;
        const bool lost = static_cast<std::int64_t>(j) >= count - 1 || (rules.apart && is_cut(j + 1)) ||
                          (rules.mask_eod && rules.eod == raw[j]) || rules.pad == raw[j + 1];
        if (!request.loss.empty()) REQUIRE(request.loss[i * inputs + j] == (lost ? 0.0F : 1.0F));
        if (j == 0 || is_cut(j)) documents.insert(static_cast<std::int64_t>(i * inputs + j));
    }
}

void check(const Request& request, const Stream& stream, const Numbers& starts, const mdata::NativeRead& found, bool indexed) {
    std::set<std::int64_t> documents;
    for (std::size_t i = 0; i < starts.size(); ++i) check_row(request, stream, i, starts[i], indexed, documents);
    if (!indexed) return;
    documents.insert(static_cast<std::int64_t>(starts.size() * (request.width - 1)));
    REQUIRE(std::equal(documents.begin(), documents.end(), found.documents.starts.begin(), found.documents.starts.end()));
    std::int64_t longest = 0;
    for (auto it = documents.begin(); std::next(it) != documents.end(); ++it) longest = std::max(longest, *std::next(it) - *it);
    REQUIRE(found.documents.longest == longest);
}

// Where samples begin, modulo 2^64; none if one is of another epoch.
std::optional<Numbers> starts_of(const Request& request, const mdata::Permutation& permutation) {
    Numbers starts;
    for (const std::int64_t sample : request.samples) {
        const __int128 place = static_cast<__int128>(sample) - request.epoch.before;
        if (place < 0 || place >= static_cast<__int128>(permutation.size())) return std::nullopt;
        const std::uint64_t slot = permutation.forward(static_cast<std::uint64_t>(place));
        starts.push_back(static_cast<std::int64_t>(static_cast<std::uint64_t>(request.epoch.offset) + (request.width - 1) * slot));
    }
    return starts;
}

void read(ByteSource& input) {
    const Tables tables(input);
    const auto index = tables.index();
    // A store of other tokens than the index tells of, where that is of any content.
    Bytes bytes(static_cast<std::size_t>(tables.sound ? tables.num_tokens : input.byte()));
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>((i * 7 + i / 5) % 8);
    const mdata::TokenStore store(mdata::TokenType::uint8, {{bytes.data(), nullptr, static_cast<std::int64_t>(bytes.size())}});
    const std::uint8_t flags = input.byte();
    const bool indexed = flags & 1;
    const mdata::Permutation permutation(flags & 4 ? static_cast<std::uint64_t>(input.number()) : 1 + input.byte() % 40,
                                         {input.byte(), 5});
    std::optional<mdata::BlockShuffle> blocks;
    const std::size_t first = input.byte() % 20, last = input.byte() % 20;
    const std::int64_t block = input.byte() % 9;
    if (flags & 2) blocks.emplace(index, static_cast<std::int64_t>(first), static_cast<std::int64_t>(last), block);
    Request request(input);
    request.epoch.blocks = blocks ? &*blocks : nullptr;
    std::optional<mdata::NativeRead> found;
    try {
        found = mdata::read_native(store, indexed ? &index : nullptr, permutation, request.samples, request.epoch, request.rules,
                                   request.rows(), 1);
        REQUIRE(!found->fault);
    } catch (const std::exception&) {
    }
    if (!tables.sound) return;
    Stream stream{{}, {tables.document_ends.begin(), tables.document_ends.end()}, 0};
    for (const std::byte value : bytes) stream.tokens.push_back(static_cast<std::int64_t>(value));
    if (blocks) stream = permuted(stream, tables, *blocks, request.epoch.blocks_key, first, last);
    const auto starts = starts_of(request, permutation);
    REQUIRE(starts || !found);
    if (!starts) return;
    const std::int64_t count = request.epoch.count;
    const bool fits = count <= static_cast<std::int64_t>(request.width) && (!indexed || request.width > 1) &&
                      std::all_of(starts->begin(), starts->end(), [&](std::int64_t start) { return stream.has(start, count); });
    if (fits) REQUIRE(found);
    if (fits && found) check(request, stream, *starts, *found, indexed);
    // What does not fit is refused, unless nothing is read.
    if (!fits && found) REQUIRE(count == 0 || starts->empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    ByteSource input(data, size);
    try {
        read(input);
    } catch (const std::exception&) {
    }
    return 0;
}
