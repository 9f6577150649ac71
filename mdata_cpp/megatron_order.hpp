// The sample index of Megatron's GPT dataset: where in the shuffled documents each sample begins.
//
// Documents are in the order D; A(d) is the number of tokens before position d. Sample k (k >= 1) begins at the
// position d that contains token k q + x - 1, at offset k q - A(d), where q is the sequence length and x the extra
// token. That is a closed form of a loop that the original runs sample by sample, so threads can fill in blocks of
// documents: a first pass counts the tokens of each block, a second one writes the rows that belong to it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <system_error>
#include <thread>
#include <vector>

namespace mdata {

// Lengths of sequences where they lie: in an .idx they begin at byte 34, so that nothing is aligned.
class Lengths {
public:
    explicit Lengths(std::span<const std::int32_t> lengths) : bytes_(std::as_bytes(lengths)) {}
    explicit Lengths(std::span<const std::byte> bytes) : bytes_(bytes) {}

    std::size_t size() const { return bytes_.size() / sizeof(std::int32_t); }

    template <typename Place>
    std::int64_t operator[](Place place) const {
        std::int32_t length;
        std::memcpy(&length, bytes_.data() + static_cast<std::size_t>(place) * sizeof length, sizeof length);
        return length;
    }

private:
    std::span<const std::byte> bytes_;
};

// What is filled in: row k is (rows[2 k], rows[2 k + 1]) for k from 1 to last; row 0 is (0, 0).
template <typename Row>
struct SampleIndex {
    Lengths lengths;
    std::int64_t sequence_length;
    std::int64_t extra;
    std::int64_t last;
    std::span<Row> rows;
};

// Rows whose samples begin in places [first, stop) of the order; `before` tokens stand before the first.
template <typename Place, typename Row>
void fill_block(const SampleIndex<Row>& index, std::span<const Place> order, std::size_t first, std::size_t stop,
                std::int64_t before) {
    const std::int64_t q = index.sequence_length;
    // The first sample whose token k q + x - 1 is not in front of this block.
    std::int64_t k = std::max<std::int64_t>(1, (before - index.extra + q) / q);
    std::int64_t token = k * q + index.extra - 1;
    for (std::size_t d = first; d < stop && k <= index.last; ++d) {
        const std::int64_t after = before + index.lengths[order[d]];
        for (; token < after && k <= index.last; ++k, token += q) {
            index.rows[static_cast<std::size_t>(2 * k)] = static_cast<Row>(d);
            index.rows[static_cast<std::size_t>(2 * k + 1)] = static_cast<Row>(k * q - before);
        }
        before = after;
    }
}

// All rows up to `last`, by so many threads. Entries of `order` are below the number of lengths: the caller checks.
template <typename Place, typename Row>
void fill_sample_index(const SampleIndex<Row>& index, std::span<const Place> order, std::size_t threads) {
    const std::size_t blocks = std::max<std::size_t>(1, std::min(threads, order.size() / 65536));
    std::vector<std::int64_t> tokens(blocks);
    const auto edge = [&](std::size_t block) { return order.size() / blocks * block + std::min(block, order.size() % blocks); };
    const auto in_parallel = [&](auto&& work) {
        std::vector<std::jthread> others;
        std::size_t block = 1;
        try {
            for (; block < blocks; ++block) others.emplace_back(work, block);
        } catch (const std::system_error&) {  // no more threads are to be had: this one does what is left
        }
        work(0);
        for (; block < blocks; ++block) work(block);
    };
    in_parallel([&](std::size_t block) {
        std::int64_t sum = 0;
        for (std::size_t d = edge(block); d < edge(block + 1); ++d) sum += index.lengths[order[d]];
        tokens[block] = sum;
    });
    std::vector<std::int64_t> before(blocks);
    for (std::size_t block = 1; block < blocks; ++block) before[block] = before[block - 1] + tokens[block - 1];
    index.rows[0] = index.rows[1] = 0;
    in_parallel([&](std::size_t block) { fill_block(index, order, edge(block), edge(block + 1), before[block]); });
}

}  // namespace mdata
