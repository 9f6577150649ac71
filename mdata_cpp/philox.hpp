// Philox4x32-10, a counter-based random generator: 128 random bits = f(64-bit key, 128-bit counter).
//
// J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Constants
// from that paper; tests/cpp/test_philox.cpp compares with the known answers of the Random123 distribution.
#pragma once

#include <array>
#include <cstdint>

namespace mdata {

using Counter = std::array<std::uint32_t, 4>;
using PhiloxKey = std::array<std::uint32_t, 2>;

inline constexpr std::array<std::uint64_t, 2> kPhiloxMultipliers{0xD2511F53, 0xCD9E8D57};
inline constexpr PhiloxKey kPhiloxKeySteps{0x9E3779B9, 0xBB67AE85};  // of the golden ratio and of sqrt(3) - 1

// Ten rounds over one counter; every bit of the result depends on every bit of key and counter.
constexpr Counter philox4x32(Counter counter, PhiloxKey key) {
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t product0 = kPhiloxMultipliers[0] * counter[0];
        const std::uint64_t product1 = kPhiloxMultipliers[1] * counter[2];
        counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
                   static_cast<std::uint32_t>(product1),
                   static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
                   static_cast<std::uint32_t>(product0)};
        key[0] += kPhiloxKeySteps[0];
        key[1] += kPhiloxKeySteps[1];
    }
    return counter;
}

}  // namespace mdata
