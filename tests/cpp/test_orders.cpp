// MT19937 and the sample index: known answers, and a walk token by token.
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "check.hpp"
#include "megatron_order.hpp"
#include "mersenne.hpp"

namespace {

void words_are_those_of_the_standard_library() {
    for (const std::uint32_t seed : {0U, 1U, 5489U, 0xFFFFFFFFU}) {
        mdata::Mersenne ours(seed);
        std::mt19937 theirs(seed);
        for (int i = 0; i < 2000; ++i) CHECK(ours.next() == theirs());
    }
}

// The plain form of numpy's legacy shuffle, one draw after another.
std::vector<std::int32_t> plain_shuffle(std::size_t n, std::uint32_t seed) {
    std::vector<std::int32_t> values(n);
    std::iota(values.begin(), values.end(), 0);
    mdata::Mersenne generator(seed);
    for (std::size_t i = n; i-- > 1;) std::swap(values[i], values[generator.up_to(i)]);
    return values;
}

void a_shuffle_in_blocks_draws_the_same() {
    for (const std::size_t n : {0U, 1U, 2U, 3U, 63U, 64U, 65U, 66U, 127U, 128U, 129U, 1000U, 70000U}) {
        std::vector<std::int32_t> values(n);
        std::iota(values.begin(), values.end(), 0);
        mdata::Mersenne(7).shuffle(std::span(values));
        CHECK(values == plain_shuffle(n, 7));
    }
}

void large_numbers_take_two_words() {
    mdata::Mersenne generator(3);
    std::mt19937 words(3);
    const std::uint64_t most = (std::uint64_t{1} << 40U) - 1;
    const std::uint64_t high = words();
    CHECK(generator.up_to(most) == ((high << 32U | words()) & most));
}

void rows_are_those_of_a_walk() {
    std::mt19937 random(11);
    for (int round = 0; round < 200; ++round) {
        std::vector<std::int32_t> lengths(1 + random() % 20);
        for (auto& length : lengths) length = static_cast<std::int32_t>(random() % 5);
        std::vector<std::int32_t> order(random() % 40);
        for (auto& place : order) place = static_cast<std::int32_t>(random() % lengths.size());
        const auto q = static_cast<std::int64_t>(1 + random() % 6);
        const auto extra = static_cast<std::int64_t>(random() % 2);
        std::vector<std::int64_t> where;  // place of each token, and its offset
        std::vector<std::int64_t> offset;
        for (std::size_t d = 0; d < order.size(); ++d) {
            for (std::int64_t o = 0; o < lengths[static_cast<std::size_t>(order[d])]; ++o) {
                where.push_back(static_cast<std::int64_t>(d));
                offset.push_back(o);
            }
        }
        const std::int64_t last = 10;
        std::vector<std::int32_t> rows(2 * (last + 1), -7);
        const mdata::SampleIndex<std::int32_t> index{mdata::Lengths{std::span<const std::int32_t>(lengths)}, q, extra, last, rows};
        mdata::fill_sample_index(index, std::span<const std::int32_t>(order), 1 + random() % 3);
        CHECK(rows[0] == 0 && rows[1] == 0);
        for (std::int64_t k = 1; k <= last; ++k) {
            const auto token = static_cast<std::size_t>(k * q + extra - 1);
            const bool inside = token < where.size();
            CHECK(rows[static_cast<std::size_t>(2 * k)] == (inside ? where[token] : -7));
            CHECK(rows[static_cast<std::size_t>(2 * k + 1)] == (inside ? offset[token] + 1 - extra : -7));
        }
    }
}

}  // namespace

int main() {
    words_are_those_of_the_standard_library();
    a_shuffle_in_blocks_draws_the_same();
    large_numbers_take_two_words();
    rows_are_those_of_a_walk();
    return check::finish("orders");
}
