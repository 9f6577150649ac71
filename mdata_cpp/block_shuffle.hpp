// The native order with shuffle_block: sequences permuted within fixed blocks of B, computed block by block.
//
// A range of sequences is divided into blocks of B, the last one shorter. In each epoch every block's sequences are
// permuted by a key of its own, so a block keeps its tokens and only the order inside it changes: token p of the
// permuted stream is in the same block as token p of the file. That block is found by a search over every B-th pointer,
// the position inside by cumulative sums of the permuted lengths: O(B) work, cached for a few blocks. The sequences
// must be contiguous in .bin. Entries of the tables are checked as they are used. Why: docs/design/order.md. Slow twin:
// tests/reference/native_order.py.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "fork_lock.hpp"
#include "helpers.hpp"
#include "permutation.hpp"
#include "sequences.hpp"

namespace mdata {

inline constexpr std::int64_t kLargestBlock = std::int64_t{1} << 20;
inline constexpr std::uint32_t kBlockTag = 0xFFFFFFFE;  // as a place no number of a block reaches it, as a round none

// The draws of one block's shuffle: two of 64 bits a word of the generator.
class BlockDraws {
public:
    BlockDraws(Key128 epoch, std::uint64_t block) {
        const Counter words = keyed_words(epoch, static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32U));
        key_ = {whole(words[0], words[1]), whole(words[2], words[3])};
    }

    // Draw i for i = 0, 1, 2 ..., in [0, i].
    std::uint64_t up_to(std::uint64_t i) {
        if (i % kAhead == 0) refill(i / 2);
        return static_cast<std::uint64_t>((static_cast<unsigned __int128>(random_[i % kAhead]) * (i + 1)) >> 64U);
    }

private:
    static constexpr std::uint64_t kAhead = 16;  // their multiplications wait together

    static std::uint64_t whole(std::uint32_t low, std::uint32_t high) { return (std::uint64_t{high} << 32U) | low; }

    void refill(std::uint64_t first) {
        for (std::uint64_t i = 0; i < kAhead / 2; ++i) {
            const Counter words = keyed_words(key_, static_cast<std::uint32_t>(first + i), kBlockTag);
            random_[2 * i] = whole(words[0], words[1]);
            random_[2 * i + 1] = whole(words[2], words[3]);
        }
    }

    Key128 key_;
    std::array<std::uint64_t, kAhead> random_{};
};

class BlockShuffle {
public:
    // Sequences [first, last) of the index, which must outlive this.
    BlockShuffle(const SequenceIndex& index, std::int64_t first, std::int64_t last, std::int64_t block)
        : index_(index), first_(first), last_(last), block_(block) {
        if (block < 1 || block > kLargestBlock) throw std::invalid_argument("a block of 1 to 2^20 sequences");
        if (first < 0 || last < first || last > index.num_sequences()) throw std::out_of_range("sequences outside of the index");
        blocks_ = (last - first + block - 1) / block;
        begin_ = index.first_token(first);
        end_ = index.first_token(last);
        if (end_ < begin_) index.bad_length(first);
        kept_.resize(static_cast<std::size_t>(std::clamp<std::int64_t>(kKeptEntries / block, kLeastKept, kMostKept)));
    }

    // The tokens, in the store, of the permuted stream's tokens [starts[i], starts[i] + counts[i]), row after row. Both
    // streams count tokens as the store does; every run lies in one sequence.
    Runs runs(Key128 epoch, std::span<const std::int64_t> starts, std::span<const std::int64_t> counts, std::size_t threads) const {
        if (starts.size() != counts.size()) throw std::invalid_argument("starts and counts differ in number");
        const std::size_t rows = starts.size();
        const std::size_t work_for = rows * static_cast<std::size_t>(block_) / kLeastForThread;
        const std::size_t parts = std::max<std::size_t>(1, std::min({threads, kMostThreads, work_for, rows}));
        std::vector<Runs> found(parts);
        std::vector<std::exception_ptr> raised(parts);
        Helpers::shared().share(parts, parts - 1, [&](std::size_t part) noexcept {
            try {
                for (std::size_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row) {
                    add_row(epoch, starts[row], counts[row], found[part]);
                }
            } catch (...) {
                raised[part] = std::current_exception();
            }
        });
        for (const auto& problem : raised) {
            if (problem) std::rethrow_exception(problem);
        }
        return joined(std::move(found));
    }

    // Where an epoch's permuted stream has the first token of a sequence, which must have one; and its tokens.
    std::pair<std::int64_t, std::int64_t> place(Key128 epoch, std::int64_t sequence) const {
        if (sequence < first_ || sequence >= last_) throw std::out_of_range("a sequence outside of the range");
        const std::int64_t start = index_.first_token(sequence);
        const std::int64_t tokens = index_.first_token(sequence + 1) - start;
        const auto block = block_at(epoch, (sequence - first_) / block_);
        std::int64_t before = block->begin;
        for (const Entry& entry : block->entries) {
            if (entry.start == start && entry.end - before == tokens) return {before, tokens};
            before = entry.end;
        }
        throw std::out_of_range("a sequence that its block does not have");
    }

private:
    static constexpr std::int64_t kKeptEntries = std::int64_t{1} << 20;  // 16 MB
    static constexpr std::int64_t kLeastKept = 4;
    static constexpr std::int64_t kMostKept = 4096;
    static constexpr std::size_t kLeastForThread = 1 << 13;
    static constexpr std::size_t kMostThreads = 64;
    static constexpr int kGuesses = 3;

    // The sequence at a place of a permuted block: where it begins in the store, where it ends in the permuted stream.
    struct Entry {
        std::int64_t start;
        std::int64_t end;
    };
    struct Block {
        Key128 epoch;
        std::int64_t number;
        std::int64_t begin;
        std::vector<Entry> entries;
    };

    std::int64_t token_of(std::int64_t block) const {
        return block == blocks_ ? end_ : index_.first_token(first_ + block * block_);
    }

    void add_row(Key128 epoch, std::int64_t start, std::int64_t count, Runs& runs) const {
        if (count < 0 || start < begin_ || start > end_ || count > end_ - start) throw std::out_of_range("tokens outside of the range");
        std::int64_t number = count > 0 ? block_of(start) : 0;
        while (count > 0) {
            const auto block = block_at(epoch, number++);
            const auto& entries = block->entries;
            auto entry = std::upper_bound(entries.begin(), entries.end(), start, [](std::int64_t at, const Entry& e) { return at < e.end; });
            for (; entry != entries.end() && count > 0; ++entry) {
                const std::int64_t before = entry == entries.begin() ? block->begin : std::prev(entry)->end;
                const std::int64_t taken = std::min(count, entry->end - start);
                if (taken == 0) continue;  // a sequence without tokens
                runs.first.push_back(entry->start + (start - before));
                runs.count.push_back(taken);
                start += taken;
                count -= taken;
            }
        }
        runs.ends.push_back(static_cast<std::int64_t>(runs.first.size()));
    }

    // The last block that begins at a token or before it. Lengths are much alike, so a guess in proportion is near, and
    // one from there nearer; then by steps that grow, then by halves.
    std::int64_t block_of(std::int64_t token) const {
        std::int64_t low = 0, high = blocks_;
        const auto probe = [&](std::int64_t block) {
            const std::int64_t error = token - token_of(block);
            (error >= 0 ? low : high) = block;
            return error;
        };
        const double density = static_cast<double>(blocks_) / static_cast<double>(end_ - begin_);
        const auto blocks_in = [&](std::int64_t tokens) { return static_cast<std::int64_t>(static_cast<double>(tokens) * density); };
        std::int64_t guess = blocks_in(token - begin_);
        for (int round = 0; round < kGuesses && guess > low && guess < high; ++round) {
            const std::int64_t error = probe(guess);
            const std::int64_t away = blocks_in(error);
            guess += away != 0 ? away : error >= 0 ? 1 : -1;
        }
        const bool upward = guess > low;
        for (std::int64_t away = 1; upward && high - low > away && probe(low + away) >= 0;) away *= 2;
        for (std::int64_t away = 1; !upward && high - low > away && probe(high - away) < 0;) away *= 2;
        while (high - low > 1) probe(low + (high - low) / 2);
        return low;
    }

    // A block, from those that are kept or made. Several threads may make the same.
    std::shared_ptr<const Block> block_at(Key128 epoch, std::int64_t number) const {
        if (number >= blocks_) throw std::out_of_range("tokens outside of the blocks");
        auto& place = kept_[static_cast<std::size_t>(number) % kept_.size()];
        {
            const std::lock_guard held(fork_lock<BlockShuffle>());
            if (place && place->number == number && place->epoch.low == epoch.low && place->epoch.high == epoch.high) return place;
        }
        const auto made = make(epoch, number);
        auto kept = made;
        const std::lock_guard held(fork_lock<BlockShuffle>());
        place.swap(kept);  // what it was goes when the lock is free again
        return made;
    }

    std::shared_ptr<const Block> make(Key128 epoch, std::int64_t number) const {
        const std::int64_t first = first_ + number * block_;
        const std::int64_t last = std::min(last_, first + block_);
        auto block = std::make_shared<Block>(Block{epoch, number, token_of(number), {}});
        auto& entries = block->entries;
        entries.resize(static_cast<std::size_t>(last - first));
        BlockDraws draws(epoch, static_cast<std::uint64_t>(number));
        std::uint64_t i = 0;
        std::int64_t start = block->begin;
        // The shuffle from inside out: sequence i goes to a place in [0, i], what stood there to place i.
        index_.lengths(first, last, [&](std::int64_t length) {
            const std::uint64_t j = draws.up_to(i);
            entries[i] = entries[j];
            entries[j] = {start, length};
            start += length;
            ++i;
        });
        if (start != token_of(number + 1)) index_.bad_length(first);
        std::int64_t end = block->begin;
        for (Entry& entry : entries) entry.end = end += entry.end;
        return block;
    }

    static Runs joined(std::vector<Runs>&& parts) {
        Runs all = std::move(parts.front());
        for (std::size_t part = 1; part < parts.size(); ++part) {
            const auto before = static_cast<std::int64_t>(all.first.size());
            for (const std::int64_t end : parts[part].ends) all.ends.push_back(before + end);
            all.first.insert(all.first.end(), parts[part].first.begin(), parts[part].first.end());
            all.count.insert(all.count.end(), parts[part].count.begin(), parts[part].count.end());
        }
        return all;
    }

    const SequenceIndex& index_;
    std::int64_t first_, last_, block_;
    std::int64_t blocks_ = 0, begin_ = 0, end_ = 0;
    mutable std::vector<std::shared_ptr<const Block>> kept_;
};

// Where runs begin inside the first `inputs` tokens of their rows: the sequences told apart, as `SequenceIndex::cuts`
// tells documents.
inline Cuts cuts_of(const Runs& runs, std::int64_t inputs) {
    Cuts found;
    std::size_t run = 0;
    for (const std::int64_t end : runs.ends) {
        std::int64_t place = 0;
        for (; run < static_cast<std::size_t>(end); ++run) {
            if (place > 0 && place < inputs) found.places.push_back(static_cast<std::int32_t>(place));
            place += runs.count[run];
        }
        found.ends.push_back(static_cast<std::int64_t>(found.places.size()));
    }
    return found;
}

}  // namespace mdata
