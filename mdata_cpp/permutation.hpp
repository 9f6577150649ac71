// A keyed permutation of [0, n): place -> value, its inverse, and both over spans.
//
// n <= 4096: a Fisher-Yates table, exact and unbiased. Above: a Feistel network over the smallest number of bits w
// with 2^w >= n, its round function Philox; values that fall outside [0, n) are sent through again ("cycle walking",
// fewer than two passes on average), which is again a permutation. O(1) memory, O(1) time, invertible.
// Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002. Why the number of rounds: docs/design/order.md.
// Slow twin: mdata/reference/permutation.py.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "philox.hpp"

namespace mdata {

// Philox takes 64 bits of key; the other 64 stand in the counter, beside a place and a tag that parts the uses.
struct Key128 {
    std::uint64_t low = 0;
    std::uint64_t high = 0;
};

inline Counter keyed_words(Key128 key, std::uint32_t place, std::uint32_t tag) {
    return philox4x32(
        {place, tag, static_cast<std::uint32_t>(key.high), static_cast<std::uint32_t>(key.high >> 32)},
        {static_cast<std::uint32_t>(key.low), static_cast<std::uint32_t>(key.low >> 32)});
}

inline constexpr std::uint64_t kLargestTable = 4096;
inline constexpr std::uint32_t kTableTag = 0xFFFFFFFF;  // no round number reaches it
inline constexpr int kFeistelRounds = 8;                // even, so that halves of unequal width end where they began

// The Feistel network alone, without the table for small n; `rounds` is a parameter for the measurement only.
class Feistel {
public:
    Feistel(std::uint64_t n, Key128 key, int rounds = kFeistelRounds) : n_(n), key_(key), rounds_(rounds) {
        const auto bits = static_cast<int>(std::bit_width(n - 1));
        left_bits_ = bits / 2;
        right_bits_ = bits - left_bits_;
    }

    std::uint64_t forward(std::uint64_t place) const {
        do place = encrypt(place);
        while (place >= n_);
        return place;
    }

    // Places side by side: a round waits for its multiplications, and those of several places wait together.
    static constexpr std::size_t kLanes = 4;
    void forward(std::array<std::uint64_t, kLanes>& places) const {
        std::array<std::uint64_t, kLanes> left, right;
        for (std::size_t i = 0; i < kLanes; ++i) {
            left[i] = places[i] >> right_bits_;
            right[i] = places[i] & mask(right_bits_);
        }
        int width = left_bits_, other = right_bits_;
        for (int round = 0; round < rounds_; ++round) {
            for (std::size_t i = 0; i < kLanes; ++i) {
                const std::uint64_t mixed = (left[i] ^ round_bits(right[i], round)) & mask(width);
                left[i] = right[i];
                right[i] = mixed;
            }
            std::swap(width, other);
        }
        for (std::size_t i = 0; i < kLanes; ++i) {
            places[i] = (left[i] << right_bits_) | right[i];
            if (places[i] >= n_) places[i] = forward(places[i]);
        }
    }

    std::uint64_t inverse(std::uint64_t value) const {
        do value = decrypt(value);
        while (value >= n_);
        return value;
    }

private:
    static std::uint64_t mask(int bits) { return (std::uint64_t{1} << bits) - 1; }

    // A half has at most 32 bits, so it fits one counter word and one word of the answer covers it.
    std::uint64_t round_bits(std::uint64_t half, int round) const {
        const Counter words = keyed_words(key_, static_cast<std::uint32_t>(half), static_cast<std::uint32_t>(round));
        return words[0];
    }

    // One round maps (left, right) to (right, left xor f(right)); the widths of the halves change places with them.
    std::uint64_t encrypt(std::uint64_t x) const {
        std::uint64_t left = x >> right_bits_;
        std::uint64_t right = x & mask(right_bits_);
        int width = left_bits_, other = right_bits_;
        for (int round = 0; round < rounds_; ++round) {
            const std::uint64_t mixed = (left ^ round_bits(right, round)) & mask(width);
            left = right;
            right = mixed;
            std::swap(width, other);
        }
        return (left << right_bits_) | right;
    }

    std::uint64_t decrypt(std::uint64_t x) const {
        std::uint64_t left = x >> right_bits_;
        std::uint64_t right = x & mask(right_bits_);
        int width = right_bits_, other = left_bits_;
        for (int round = rounds_ - 1; round >= 0; --round) {
            const std::uint64_t mixed = (right ^ round_bits(left, round)) & mask(width);
            right = left;
            left = mixed;
            std::swap(width, other);
        }
        return (left << right_bits_) | right;
    }

    std::uint64_t n_;
    Key128 key_;
    int rounds_;
    int left_bits_ = 0;
    int right_bits_ = 0;
};

class Permutation {
public:
    Permutation(std::uint64_t n, Key128 key) : n_(n), key_(key), feistel_(checked(n), key) {
        if (n <= kLargestTable) fill_table();
    }

    std::uint64_t size() const { return n_; }
    Key128 key() const { return key_; }

    // The argument must be below size(); the span forms check it.
    std::uint64_t forward(std::uint64_t place) const {
        return table_.empty() ? feistel_.forward(place) : table_[place];
    }
    std::uint64_t inverse(std::uint64_t value) const {
        return table_.empty() ? feistel_.inverse(value) : inverse_table_[value];
    }

    void forward(std::span<const std::int64_t> places, std::span<std::int64_t> values) const {
        spread(places, 0, 0, 1, values);
    }
    // offset + step * forward(places[i] - before), modulo 2^64.
    void spread(std::span<const std::int64_t> places, std::int64_t before, std::int64_t offset, std::int64_t step,
                std::span<std::int64_t> values) const {
        const auto as = [](std::int64_t number) { return static_cast<std::uint64_t>(number); };
        const auto place = [&](std::size_t i) {
            if (places[i] < before) throw std::out_of_range("a number outside [0, n)");
            return in_range(static_cast<std::int64_t>(as(places[i]) - as(before)));
        };
        const auto set = [&](std::size_t i, std::uint64_t value) {
            values[i] = static_cast<std::int64_t>(as(offset) + as(step) * value);
        };
        std::size_t i = 0;
        for (; table_.empty() && i + Feistel::kLanes <= places.size(); i += Feistel::kLanes) {
            std::array<std::uint64_t, Feistel::kLanes> lanes;
            for (std::size_t lane = 0; lane < Feistel::kLanes; ++lane) lanes[lane] = place(i + lane);
            feistel_.forward(lanes);
            for (std::size_t lane = 0; lane < Feistel::kLanes; ++lane) set(i + lane, lanes[lane]);
        }
        for (; i < places.size(); ++i) set(i, forward(place(i)));
    }
    void inverse(std::span<const std::int64_t> values, std::span<std::int64_t> places) const {
        for (std::size_t i = 0; i < values.size(); ++i)
            places[i] = static_cast<std::int64_t>(inverse(in_range(values[i])));
    }

private:
    static std::uint64_t checked(std::uint64_t n) {
        if (n == 0 || n > std::uint64_t{1} << 63) throw std::invalid_argument("n must be in [1, 2^63]");
        return n;
    }

    std::uint64_t in_range(std::int64_t x) const {
        if (x < 0 || static_cast<std::uint64_t>(x) >= n_) throw std::out_of_range("an entry is not in [0, n)");
        return static_cast<std::uint64_t>(x);
    }

    // Fisher-Yates from the end; draw i is the high half of (64 random bits) x (i + 1), off uniform by less than 2^-51.
    void fill_table() {
        table_.resize(n_);
        inverse_table_.resize(n_);
        std::iota(table_.begin(), table_.end(), std::uint16_t{0});
        for (std::uint64_t i = n_ - 1; i > 0; --i) {
            const Counter words = keyed_words(key_, static_cast<std::uint32_t>(i), kTableTag);
            const std::uint64_t random = (std::uint64_t{words[1]} << 32) | words[0];
            const auto j = static_cast<std::uint64_t>((static_cast<unsigned __int128>(random) * (i + 1)) >> 64);
            std::swap(table_[i], table_[j]);
        }
        for (std::uint64_t i = 0; i < n_; ++i) inverse_table_[table_[i]] = static_cast<std::uint16_t>(i);
    }

    std::uint64_t n_;
    Key128 key_;
    Feistel feistel_;
    std::vector<std::uint16_t> table_;
    std::vector<std::uint16_t> inverse_table_;
};

}  // namespace mdata
