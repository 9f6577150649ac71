// MT19937, the generator of numpy's RandomState(seed) and std::mt19937(seed); draws.hpp has numpy's ways to draw.
//
// Source: Matsumoto and Nishimura, "Mersenne Twister", ACM TOMACS 8 (1998). Words are generated and tempered 624 at a
// time, in loops that compilers vectorize.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "draws.hpp"

namespace mdata {

class Mersenne : public Draws<Mersenne> {
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

    // Swap each place with one at or behind it, from the first on: what torch.randperm does to 0, 1, 2 ...
    // Slow twin: tests/reference/mersenne.py.
    template <typename T>
    void swap_onwards(std::span<T> values) {
        for (std::size_t i = 0; i + 1 < values.size(); ++i) std::swap(values[i], values[i + next() % (values.size() - i)]);
    }

private:
    static constexpr std::size_t words = 624;
    static constexpr std::size_t middle = 397;

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
