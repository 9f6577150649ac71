// numpy's legacy draws (RandomState) from any generator of 32-bit words: shared by the two generators of this core.
//
// A generator derives from Draws<itself> and has `std::uint32_t next()`. Numbers in a range are drawn by masking words
// and rejecting those that are too large; `real` takes 53 bits of two words. `shuffle` is Fisher and Yates' from the
// end; its numbers are drawn a block in advance, without a branch, and their positions prefetched, because it would
// otherwise wait for memory. Nothing here adds to a product, so compilers that fuse the two change no bit.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace mdata {

template <typename Generator>
class Draws {
public:
    // A number in [0, most]; 0 draws nothing. RandomState's interval of `shuffle` and `randint`.
    std::uint64_t up_to(std::uint64_t most) {
        if (most == 0) return 0;
        const std::uint64_t mask = mask_for(most);
        for (;;) {
            const std::uint64_t value = draw(most) & mask;
            if (value <= most) return value;
        }
    }

    // A number in [low, high), which is not empty: randint(low, high).
    std::int64_t integer(std::int64_t low, std::int64_t high) {
        const auto most = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low) - 1;
        return static_cast<std::int64_t>(static_cast<std::uint64_t>(low) + up_to(most));
    }

    // A number in [0, 1): random_sample().
    double real() {
        const std::uint64_t high = word() >> 5U;
        const std::uint64_t low = word() >> 6U;
        return static_cast<double>(high << 26U | low) / 9007199254740992.0;
    }

    // Which of bounds.size() things, by the running sums of their probabilities: choice(n, p=p).
    std::size_t pick(std::span<const double> bounds) {
        return static_cast<std::size_t>(std::upper_bound(bounds.begin(), bounds.end(), real()) - bounds.begin());
    }

    // How many trials until the first success of probability p < 1/3: geometric(p).
    std::int64_t geometric(double p) {
        return static_cast<std::int64_t>(std::ceil(std::log1p(-real()) / std::log(1.0 - p)));
    }

    template <typename T>
    void shuffle(std::span<T> values) {
        constexpr std::size_t ahead = 64;
        std::array<std::uint64_t, ahead + 1> places;
        for (std::uint64_t i = values.size() < 2 ? 0 : values.size() - 1; i > 0;) {
            // Within a block the mask stays the same: its last number is the smallest of its number of bits.
            const std::uint64_t count = std::min<std::uint64_t>(ahead, i - (std::bit_floor(i) - 1));
            draw_down(i, count, places.data());
            for (std::uint64_t k = 0; k < count; ++k) __builtin_prefetch(&values[places[k]], 1);
            for (std::uint64_t k = 0; k < count; ++k) std::swap(values[i - k], values[places[k]]);
            i -= count;
        }
    }

private:
    static std::uint64_t mask_for(std::uint64_t most) { return ~std::uint64_t{0} >> std::countl_zero(most); }

    std::uint64_t word() { return static_cast<Generator&>(*this).next(); }

    // One word, or for a number above 32 bits two, the high half first.
    std::uint64_t draw(std::uint64_t most) {
        const std::uint64_t high = word();
        return most <= 0xFFFFFFFFU ? high : high << 32U | word();
    }

    // Numbers in [0, from], [0, from - 1], ...: `count` of them, all of one mask. `places` has room for one more.
    void draw_down(std::uint64_t from, std::uint64_t count, std::uint64_t* places) {
        const std::uint64_t mask = mask_for(from);
        for (std::uint64_t k = 0; k < count;) {
            const std::uint64_t value = draw(from) & mask;
            places[k] = value;
            k += value <= from - k ? 1U : 0U;
        }
    }
};

}  // namespace mdata
