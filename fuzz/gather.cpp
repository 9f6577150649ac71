// The batched read (mdata_cpp/gather.hpp, sequences.hpp, block_shuffle.hpp, rows.hpp) over tables and requests of any
// content.
//
// The bytes become shards, runs, places, an order and the tables of an index, in buffers of just their size, so that the
// sanitizers see every read outside. A request is either refused by an exception or gives what a walk token by token
// gives. Built with libFuzzer where clang is, else with fuzz/driver.cpp.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "input.hpp"
#include "block_shuffle.hpp"
#include "gather.hpp"
#include "rows.hpp"
#include "sequences.hpp"

namespace {

using Numbers = std::vector<std::int64_t>;
using Bytes = std::vector<std::byte>;

using Input = ByteSource;

template <typename T>
Bytes bytes_of(const std::vector<T>& values) {
    Bytes bytes(values.size() * sizeof(T));
    if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
}

void gathered(Input& input) {
    std::vector<Bytes> kept(input.byte() % 4);
    std::vector<mdata::TokenFile> files;
    Numbers stream;
    for (auto& bytes : kept) {
        bytes.resize(input.byte() % 80);
        for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(stream.size() + i);
        for (const std::byte value : bytes) stream.push_back(static_cast<std::int64_t>(value));
        files.push_back({bytes.data(), nullptr, static_cast<std::int64_t>(bytes.size())});
    }
    const mdata::TokenStore store(mdata::TokenType::uint8, files);
    const std::size_t width = input.byte() % 70;
    Numbers out(width * (input.byte() % 6), -1);
    const Numbers first = input.numbers(8), count = input.numbers(8), ends = input.numbers(4), places = input.numbers(4);
    const mdata::RowRuns runs{first, count, ends, places};
    try {
        REQUIRE(!store.gather(runs, {out, width, -2}, 1));
    } catch (const std::exception&) {
        return;
    }
    for (std::size_t row = 0; row < runs.rows(); ++row) {
        // A place that stands twice has the tokens of the later row.
        if (std::count(places.begin(), places.end(), static_cast<std::int64_t>(runs.place(row))) > 1) continue;
        Numbers expected;
        for (std::size_t run = runs.begin(row); run < runs.end(row); ++run) {
            for (std::int64_t k = 0; k < count[run]; ++k) expected.push_back(stream.at(static_cast<std::size_t>(first[run] + k)));
        }
        REQUIRE(expected.size() <= width);
        expected.resize(width, -2);
        REQUIRE(std::equal(expected.begin(), expected.end(), out.begin() + static_cast<std::ptrdiff_t>(runs.place(row) * width)));
    }
}

void indexed(Input& input) {
    struct Kept {
        Bytes lengths, pointers, boundaries;
    };
    std::vector<Kept> kept(input.byte() % 3);
    std::vector<mdata::ShardTables> shards;
    const std::int64_t item = 1 + (input.byte() & 1);
    for (Kept& tables : kept) {
        const bool sound = input.byte() & 1;
        const std::size_t sequences = input.byte() % 20;
        std::vector<std::int32_t> lengths;
        Numbers pointers, boundaries;
        std::int64_t tokens = 0;
        for (std::size_t i = 0; i < sequences; ++i) {
            lengths.push_back(sound ? input.byte() % 16 : static_cast<std::int32_t>(input.number()));
            pointers.push_back(sound ? tokens * item : input.number());
            tokens += sound ? lengths.back() : 0;
            boundaries.push_back(sound ? static_cast<std::int64_t>(i) : input.number());
        }
        boundaries.push_back(sound ? static_cast<std::int64_t>(sequences) : input.number());
        tables = {bytes_of(lengths), bytes_of(pointers), bytes_of(boundaries)};
        shards.push_back({tables.lengths.data(), tables.pointers.data(), tables.boundaries.data(),
                          static_cast<std::int64_t>(sequences), static_cast<std::int64_t>(sequences),
                          sound ? tokens : input.number() & 0xFFFF});
    }
    const mdata::SequenceIndex index(item, shards);
    try {
        const Numbers starts = input.numbers(4), counts = input.numbers(4);
        const auto cuts = index.cuts(starts, counts);
        std::size_t at = 0;
        for (std::size_t i = 0; i < starts.size(); ++i) {
            for (std::int32_t last = 0; at < static_cast<std::size_t>(cuts.ends[i]); last = cuts.places[at++]) {
                REQUIRE(cuts.places[at] > last && cuts.places[at] < counts[i]);
            }
        }
        REQUIRE(at == cuts.places.size());
    } catch (const std::exception&) {
    }
    try {
        const Numbers starts = input.numbers(4), counts = input.numbers(4);
        std::uint64_t wanted = 0;
        for (const std::int64_t count : counts) wanted += static_cast<std::uint64_t>(count);
        REQUIRE(index.odd_sequences(starts, counts).size() == wanted);
    } catch (const std::exception&) {
    }
    try {
        const auto runs = index.pieces(std::span<const std::int64_t>(input.numbers(8)), input.numbers(8), input.byte() & 1);
        for (std::size_t i = 0; i < runs.first.size(); ++i) {
            REQUIRE(runs.first[i] >= 0 && runs.count[i] >= 0 && runs.count[i] <= index.num_tokens() - runs.first[i]);
        }
    } catch (const std::exception&) {
    }
    try {
        const Numbers numbers = input.numbers(4);
        Numbers first(numbers.size()), count(numbers.size());
        index.documents(numbers, first, count);
        for (std::size_t i = 0; i < first.size(); ++i) {
            REQUIRE(first[i] >= 0 && count[i] >= 0 && count[i] <= index.num_tokens() - first[i]);
        }
    } catch (const std::exception&) {
    }
    try {
        const auto first = static_cast<std::int64_t>(input.byte() % 20), last = static_cast<std::int64_t>(input.byte() % 40);
        const mdata::BlockShuffle blocks(index, first, last, input.byte() % 9);
        const Numbers starts = input.numbers(4), counts = input.numbers(4);
        const auto runs = blocks.runs({static_cast<std::uint64_t>(input.number()), 0}, starts, counts, 1);
        std::int64_t before = 0;
        std::size_t run = 0;
        for (std::size_t row = 0; row < starts.size(); ++row) {
            for (; run < static_cast<std::size_t>(runs.ends[row]); ++run) {
                REQUIRE(runs.first[run] >= 0 && runs.count[run] > 0 && runs.count[run] <= index.num_tokens() - runs.first[run]);
                before += runs.count[run];
            }
            REQUIRE(before == counts[row]);
            before = 0;
        }
        blocks.place({}, input.byte() % 40);
    } catch (const std::exception&) {
    }
}

void finished(Input& input) {
    Numbers text(1 + input.byte() % 20);
    for (auto& token : text) token = input.byte() % 4;
    const std::size_t inputs = text.size() - 1;
    std::vector<std::int32_t> cuts;
    for (const std::int64_t cut : input.numbers(4)) cuts.push_back(static_cast<std::int32_t>(cut));
    std::vector<float> loss(input.byte() & 1 ? inputs : 0);
    Numbers positions(input.byte() & 1 ? inputs : 0, -1);
    const std::uint8_t flags = input.byte();
    mdata::RowRules rules{.mask_eod = (flags & 1) != 0, .restart_at_eod = (flags & 2) != 0};
    if (flags & 4) rules.pad = input.byte() % 4;
    if (flags & 8) rules.eod = input.byte() % 4;
    mdata::finish_row(rules, {text, input.number(), cuts, loss, positions});
    for (std::size_t i = 0; i < positions.size(); ++i) {
        REQUIRE(positions[i] == 0 || positions[i] == (i == 0 ? 0 : positions[i - 1] + 1));
    }
    for (const float value : loss) REQUIRE(value == 0.0F || value == 1.0F);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Input input(data, size);
    gathered(input);
    indexed(input);
    finished(input);
    return 0;
}
