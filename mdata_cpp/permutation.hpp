// A keyed permutation of [0, n): position -> value, its inverse, and both over spans.
//
// n <= 4096: a Fisher-Yates table, exact and unbiased. Above: a Feistel network (feistel.hpp). O(1) memory, O(1) time,
// invertible. Slow twin: tests/reference/permutation.py.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <stdexcept>
#include <vector>

#include "feistel.hpp"
#include "philox.hpp"

namespace mdata {

inline constexpr std::uint64_t kLargestTable = 4096;
inline constexpr std::uint32_t kTableTag = 0xFFFFFFFF;  // no round number reaches it

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
        std::array<std::uint64_t, kAtOnce> few;
        for (std::size_t first = 0; first < places.size(); first += kAtOnce) {
            const std::size_t count = std::min(places.size() - first, kAtOnce);
            for (std::size_t i = 0; i < count; ++i) {
                const std::int64_t place = places[first + i];
                if (place < before) throw std::out_of_range("a number outside [0, n)");
                few[i] = in_range(static_cast<std::int64_t>(as(place) - as(before)));
            }
            if (table_.empty()) feistel_.forward(std::span(few).first(count));
            for (std::size_t i = 0; i < count; ++i) {
                const std::uint64_t value = table_.empty() ? few[i] : table_[few[i]];
                values[first + i] = static_cast<std::int64_t>(as(offset) + as(step) * value);
            }
        }
    }
    void inverse(std::span<const std::int64_t> values, std::span<std::int64_t> places) const {
        for (std::size_t i = 0; i < values.size(); ++i)
            places[i] = static_cast<std::int64_t>(inverse(in_range(values[i])));
    }

private:
    static constexpr std::size_t kAtOnce = 256;

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
