// MT19937, the generator behind numpy's RandomState(seed) and std::mt19937(seed), and numpy's way to draw from it.
//
// Source: Matsumoto and Nishimura, "Mersenne Twister", ACM TOMACS 8 (1998). Words are made and tempered 624 at a time,
// in loops that compilers turn into vector code. `shuffle` is numpy's legacy shuffle of a list of numbers: for i from
// n - 1 down to 1 swap i with a number in [0, i], drawn by masking words and passing over those that are too large. The
// numbers are drawn a block ahead, without a branch, and their places prefetched: a shuffle waits for memory otherwise.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace mdata {

class Mersenne {
public:
    explicit Mersenne(std::uint32_t seed) {
        state_[0] = seed;
        for (std::uint32_t i = 1; i < words; ++i) {
            state_[i] = 1812433253U * (state_[i - 1] ^ (state_[i - 1] >> 30U)) + i;
        }
    }

    // The next word, tempered.
    std::uint32_t next() {
        if (at_ == words) refill();
        return tempered_[at_++];
    }

    // A number in [0, most]; 0 draws nothing.
    std::uint64_t up_to(std::uint64_t most) {
        if (most == 0) return 0;
        const std::uint64_t mask = mask_for(most);
        for (;;) {
            const std::uint64_t value = draw(most) & mask;
            if (value <= most) return value;
        }
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
    static constexpr std::size_t words = 624;
    static constexpr std::size_t middle = 397;

    static std::uint64_t mask_for(std::uint64_t most) { return ~std::uint64_t{0} >> std::countl_zero(most); }

    // One word, or for a number above 32 bits two, the high half first.
    std::uint64_t draw(std::uint64_t most) {
        const std::uint64_t high = next();
        return most <= 0xFFFFFFFFU ? high : high << 32U | next();
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

    void refill() {
        const auto mixed = [this](std::size_t i, std::size_t after, std::size_t other) {
            const std::uint32_t y = (state_[i] & 0x80000000U) | (state_[after] & 0x7FFFFFFFU);
            state_[i] = state_[other] ^ (y >> 1U) ^ ((y & 1U) != 0 ? 0x9908B0DFU : 0U);
        };
        for (std::size_t i = 0; i < words - middle; ++i) mixed(i, i + 1, i + middle);
        for (std::size_t i = words - middle; i < words - 1; ++i) mixed(i, i + 1, i + middle - words);
        mixed(words - 1, 0, middle - 1);
        for (std::size_t i = 0; i < words; ++i) {
            std::uint32_t y = state_[i];
            y ^= y >> 11U;
            y ^= (y << 7U) & 0x9D2C5680U;
            y ^= (y << 15U) & 0xEFC60000U;
            tempered_[i] = y ^ (y >> 18U);
        }
        at_ = 0;
    }

    std::array<std::uint32_t, words> state_;
    std::array<std::uint32_t, words> tempered_;
    std::size_t at_ = words;
};

}  // namespace mdata
