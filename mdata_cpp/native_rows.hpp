// Whole batches of the native order in one call: where samples begin, their tokens, and their masks and documents.
//
// The same as Permutation, SequenceIndex, TokenStore and rows.hpp one after the other, without returning to Python in
// between: for eight rows that would cost as much as reading their tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "block_shuffle.hpp"
#include "gather.hpp"
#include "permutation.hpp"
#include "rows.hpp"
#include "sequences.hpp"

namespace mdata {

// Samples of one epoch: sample s begins at token offset + (width - 1) * forward(s - before), and has `count` tokens; of
// the file, or of the stream that `blocks` makes of it.
struct EpochRows {
    std::int64_t before;
    std::int64_t offset;
    std::int64_t count;
    const BlockShuffle* blocks = nullptr;
    Key128 blocks_key{};
};

struct NativeRead {
    std::optional<ReadFault> fault;
    CumulativeLengths documents;  // with an index
};

// Fills rows of the buffer; without an index positions do not restart. Raises out_of_range for a sample of another epoch.
inline NativeRead read_native(const TokenStore& store, const SequenceIndex* index, const Permutation& permutation,
                              std::span<const std::int64_t> samples, const EpochRows& epoch, const RowRules& rules,
                              const RowArrays& rows, std::size_t threads) {
    const auto inputs = static_cast<std::int64_t>(rows.width) - 1;
    std::vector<std::int64_t> starts(samples.size());
    permutation.spread(samples, epoch.before, epoch.offset, inputs, starts);
    const std::vector<std::int64_t> counts(samples.size(), epoch.count);
    NativeRead found;
    Runs runs;
    if (epoch.blocks != nullptr) {
        runs = epoch.blocks->runs(epoch.blocks_key, starts, counts, threads);
        found.fault = store.gather({runs.first, runs.count, runs.ends, {}}, {rows.text, rows.width, 0}, threads);
    } else {
        found.fault = store.gather({starts, counts, {}, {}}, {rows.text, rows.width, 0}, threads);
    }
    if (found.fault) return found;
    Cuts cuts;
    if (index != nullptr) {
        const std::vector<std::int64_t> many(samples.size(), std::min(epoch.count, inputs));
        cuts = epoch.blocks != nullptr ? cuts_of(runs, many.empty() ? 0 : many.front()) : index->cuts(starts, many);
        found.documents = cumulative_lengths(cuts.ends, cuts.places, inputs);
    }
    if (!rows.loss.empty() || !rows.positions.empty() || rules.pad) finish_rows(rules, rows, counts, cuts.ends, cuts.places);
    return found;
}

}  // namespace mdata
