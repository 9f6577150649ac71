// Known answers, bijection by brute force, inverse, ranges. The known answers freeze version 1 of the native order.
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "check.hpp"
#include "permutation.hpp"

namespace {

constexpr mdata::Key128 kKey{0x0123456789abcdef, 0xfedcba9876543210};

void check_bijection(std::uint64_t n, mdata::Key128 key) {
    const mdata::Permutation permutation(n, key);
    std::vector<bool> seen(n);
    bool onto = true, inverted = true;
    for (std::uint64_t i = 0; i < n; ++i) {
        const std::uint64_t value = permutation.forward(i);
        onto = onto && value < n && !seen[value];
        if (value < n) seen[value] = true;
        inverted = inverted && permutation.inverse(value) == i;
    }
    CHECK(onto);
    CHECK(inverted);
}

void known_answers() {
    const mdata::Permutation eight(8, kKey);
    const std::array<std::uint64_t, 8> table{2, 6, 4, 1, 7, 3, 5, 0};
    for (std::uint64_t i = 0; i < 8; ++i) CHECK(eight.forward(i) == table[i]);
    CHECK(mdata::Permutation(4096, kKey).forward(0) == 2622);
    CHECK(mdata::Permutation(4097, kKey).forward(0) == 201);
    CHECK(mdata::Permutation(1000000000000, kKey).forward(1) == 321503437300);
    CHECK(mdata::Permutation(std::uint64_t{1} << 63, kKey).forward((std::uint64_t{1} << 63) - 1) == 9135455916395568358);
}

void refuses_what_is_outside() {
    CHECK_THROWS(std::invalid_argument, mdata::Permutation(0, kKey));
    CHECK_THROWS(std::invalid_argument, mdata::Permutation((std::uint64_t{1} << 63) + 1, kKey));
    for (const std::uint64_t n : {std::uint64_t{10}, std::uint64_t{5000}}) {
        const mdata::Permutation permutation(n, kKey);
        std::array<std::int64_t, 1> out{};
        for (const std::int64_t bad : {std::int64_t{-1}, static_cast<std::int64_t>(n)}) {
            const std::array<std::int64_t, 1> in{bad};
            CHECK_THROWS(std::out_of_range, permutation.forward(in, out));
            CHECK_THROWS(std::out_of_range, permutation.inverse(in, out));
        }
    }
}

// Many at once are what single ones are, shifted and scaled, whatever their number.
void spreads() {
    for (const std::uint64_t n : {std::uint64_t{4096}, std::uint64_t{4097}, std::uint64_t{70000}}) {
        const mdata::Permutation permutation(n, kKey);
        for (std::size_t count = 0; count < 20; ++count) {
            std::vector<std::int64_t> places(count), values(count);
            for (std::size_t i = 0; i < count; ++i) places[i] = static_cast<std::int64_t>(1000 + (i * 7919) % n);
            permutation.spread(places, 1000, 5, 3, values);
            for (std::size_t i = 0; i < count; ++i) {
                const auto value = permutation.forward(static_cast<std::uint64_t>(places[i] - 1000));
                CHECK(values[i] == static_cast<std::int64_t>(5 + 3 * value));
            }
        }
        for (const std::int64_t bad : {INT64_MIN, std::int64_t{999}, static_cast<std::int64_t>(1000 + n), INT64_MAX}) {
            const std::vector<std::int64_t> places{1000, 1001, bad, 1002};
            std::vector<std::int64_t> values(4);
            CHECK_THROWS(std::out_of_range, permutation.spread(places, 1000, 5, 3, values));
        }
    }
}

// Places side by side are what single ones are, whatever their number and the processor.
void together() {
    const std::uint64_t huge = (std::uint64_t{1} << 63) - 25;
    for (const std::uint64_t n : {std::uint64_t{1}, std::uint64_t{3}, std::uint64_t{4097}, std::uint64_t{65537}, (std::uint64_t{1} << 32) + 1, huge}) {
        for (const bool wide : {false, mdata::has_wide_vectors()}) {
            const mdata::Feistel feistel(n, kKey, mdata::kFeistelRounds, wide);
            for (std::size_t count = 0; count < 150; ++count) {
                std::vector<std::uint64_t> places(count), expected(count);
                for (std::size_t i = 0; i < count; ++i) {
                    places[i] = i * 9007199254740881 % n;
                    expected[i] = feistel.forward(places[i]);
                }
                feistel.forward(std::span(places));
                CHECK(places == expected);
            }
        }
    }
}

}  // namespace

int main() {
    known_answers();
    together();
    spreads();
    refuses_what_is_outside();
    for (std::uint64_t n = 1; n <= 40; ++n) check_bijection(n, {n, 7});
    for (const std::uint64_t n : {4095, 4096, 4097, 5000, 8191, 8192, 8193, 70000}) check_bijection(n, {1, n});
    // The network alone, at sizes where the table stands in its place: all widths of halves, zero bits included.
    for (std::uint64_t n = 1; n <= 300; ++n) {
        const mdata::Feistel feistel(n, kKey);
        std::vector<bool> seen(n);
        bool sound = true;
        for (std::uint64_t i = 0; i < n; ++i) {
            const std::uint64_t value = feistel.forward(i);
            sound = sound && value < n && !seen[value] && feistel.inverse(value) == i;
            if (value < n) seen[value] = true;
        }
        CHECK(sound);
    }
    const std::uint64_t huge = (std::uint64_t{1} << 63) - 25;
    const mdata::Permutation permutation(huge, kKey);
    for (std::uint64_t i = 0; i < 1000; ++i) {
        const std::uint64_t place = huge - 1 - i * 9007199254740881;
        CHECK(permutation.inverse(permutation.forward(place)) == place);
    }
    return check::finish("permutation");
}
