// A keyed permutation of [0, n) that needs no memory: a Feistel network over the smallest number of bits w with 2^w >=
// n, whose round function is Philox. Values that fall outside [0, n) go through the network again ("cycle walking",
// fewer than two passes on average), which is again a permutation.
//
// Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002. Why the number of rounds:
// docs/design/order.md. One position waits for 80 dependent multiplications, so positions are processed side by side;
// those of a pass that fell outside are again processed together. Slow twin: tests/reference/permutation.py.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "philox.hpp"
#include "wide.hpp"

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

inline constexpr int kFeistelRounds = 8;  // even, so that halves of unequal width end where they began

// `rounds` is a parameter for the measurement only.
class Feistel {
public:
    Feistel(std::uint64_t n, Key128 key, int rounds = kFeistelRounds, bool wide = has_wide_vectors())
        : n_(n), key_(key), rounds_(rounds), wide_(wide) {
        const auto bits = static_cast<int>(std::bit_width(n - 1));
        left_bits_ = bits / 2;
        right_bits_ = bits - left_bits_;
    }

    std::uint64_t forward(std::uint64_t place) const {
        do place = encrypt(place);
        while (place >= n_);
        return place;
    }

    // Each place in its value's stead.
    void forward(std::span<std::uint64_t> places) const {
        for (; !places.empty(); places = places.subspan(std::min(places.size(), kTogether))) {
            walk(places.first(std::min(places.size(), kTogether)));
        }
    }

    std::uint64_t inverse(std::uint64_t value) const {
        do value = decrypt(value);
        while (value >= n_);
        return value;
    }

private:
    static constexpr std::size_t kTogether = 64;
    static constexpr std::size_t kLanes = 8;

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

    // At most kTogether places: passes over those that are still outside.
    void walk(std::span<std::uint64_t> places) const {
        std::array<std::uint64_t, kTogether> walking{};  // a pass reads up to a multiple of kLanes
        std::array<std::size_t, kTogether> at;
        std::copy(places.begin(), places.end(), walking.begin());
        for (std::size_t i = 0; i < places.size(); ++i) at[i] = i;
        for (std::size_t left = places.size(); left > 0;) {
            pass(std::span(walking).first(left));
            std::size_t outside = 0;
            for (std::size_t i = 0; i < left; ++i) {
                places[at[i]] = walking[i];
                at[outside] = at[i];
                walking[outside] = walking[i];
                outside += walking[i] >= n_ ? 1 : 0;
            }
            left = outside;
        }
    }

    // The network once, over each of the places; what stands behind them up to a multiple of kLanes is lost.
    void pass(std::span<std::uint64_t> places) const {
#if defined(__x86_64__)
        if (wide_ && places.size() > 1) {
            for (std::size_t i = 0; i < places.size(); i += kLanes) encrypt_wide(places.data() + i);
            return;
        }
#endif
        for (std::uint64_t& place : places) place = encrypt(place);
    }

#if defined(__x86_64__)
    // `encrypt` of kLanes places in two vectors. Numbers of 32 bits lie in lanes of 64, whose upper halves hold what the
    // multiplication does not look at.
    MDATA_FOR_AVX2 void encrypt_wide(std::uint64_t* places) const {
        auto* const at = reinterpret_cast<__m256i*>(places);
        const __m128i shift = _mm_cvtsi32_si128(right_bits_);
        __m256i masks[2] = {_mm256_set1_epi64x(static_cast<long long>(mask(left_bits_))),
                            _mm256_set1_epi64x(static_cast<long long>(mask(right_bits_)))};
        __m256i left[2], right[2];
        for (int k = 0; k < 2; ++k) {
            const __m256i place = _mm256_loadu_si256(at + k);
            left[k] = _mm256_srl_epi64(place, shift);
            right[k] = _mm256_and_si256(place, masks[1]);
        }
        for (int round = 0; round < rounds_; ++round) {
            __m256i words[2] = {right[0], right[1]};
            first_words_wide(words, static_cast<std::uint32_t>(round));
            for (int k = 0; k < 2; ++k) {
                const __m256i mixed = _mm256_and_si256(_mm256_xor_si256(left[k], words[k]), masks[0]);
                left[k] = right[k];
                right[k] = mixed;
            }
            std::swap(masks[0], masks[1]);
        }
        for (int k = 0; k < 2; ++k) {
            _mm256_storeu_si256(at + k, _mm256_or_si256(_mm256_sll_epi64(left[k], shift), right[k]));
        }
    }

    // A word of 32 bits in each lane.
    MDATA_FOR_AVX2 static __m256i all(std::uint64_t word) { return _mm256_set1_epi64x(static_cast<long long>(word & 0xffffffff)); }

    // The first word of `keyed_words`, for each place in its stead.
    MDATA_FOR_AVX2 void first_words_wide(__m256i (&places)[2], std::uint32_t tag) const {
        __m256i c0[2] = {places[0], places[1]}, c1[2], c2[2], c3[2];
        for (int k = 0; k < 2; ++k) {
            c1[k] = all(tag);
            c2[k] = all(key_.high);
            c3[k] = all(key_.high >> 32);
        }
        std::uint64_t key0 = key_.low, key1 = key_.low >> 32;
        for (int round = 0; round < 10; ++round) {
            for (int k = 0; k < 2; ++k) {
                const __m256i product0 = _mm256_mul_epu32(c0[k], all(kPhiloxMultipliers[0]));
                const __m256i product1 = _mm256_mul_epu32(c2[k], all(kPhiloxMultipliers[1]));
                c0[k] = _mm256_xor_si256(_mm256_srli_epi64(product1, 32), _mm256_xor_si256(c1[k], all(key0)));
                c2[k] = _mm256_xor_si256(_mm256_srli_epi64(product0, 32), _mm256_xor_si256(c3[k], all(key1)));
                c1[k] = product1;
                c3[k] = product0;
            }
            key0 += kPhiloxKeySteps[0];
            key1 += kPhiloxKeySteps[1];
        }
        places[0] = c0[0];
        places[1] = c0[1];
    }
#endif

    std::uint64_t n_;
    Key128 key_;
    int rounds_;
    bool wide_;
    int left_bits_ = 0;
    int right_bits_ = 0;
};

}  // namespace mdata
