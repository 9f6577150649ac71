// How many Feistel rounds does the permutation need? Bias over many keys, at n just above the table's end.
//
//   cmake -S . -B build/cpp -DMDATA_BUILD_TESTS=ON -DMDATA_BUILD_MODULE=OFF
//   cmake --build build/cpp --target permutation_bias && build/cpp/permutation_bias [22 17] > out.json   (log2 of both key counts)
//
// For each n and number of rounds, over 2^22 keys, pairs of places (a, b) are sent through the permutation. Under a
// uniformly random permutation every statistic below is a standard normal deviate z (a chi-square of many cells is
// turned into one by (x - df) / sqrt(2 df)); |z| above 4 to 5 is bias. Pairs: neighbours; equal right halves (they
// differ by a multiple of 2^7); equal left halves.
//   place  P(a) over its n values
//   step   P(b) - P(a) mod n over its n - 1 values: what "adjacent samples" turn into
//   order  how often P(a) < P(b)
//   left, right   the xor of the two left (right) halves: where a Feistel network of few rounds is weakest
// Then whole permutations of 2^17 keys: over all pairs of places with equal right halves, how often do the left halves
// of the values have the same xor as those of the places? That is the relation that a few rounds keep too often
// (Patarin, "Generic attacks on Feistel schemes", ASIACRYPT 2001); `excess` is relative to a uniformly random
// permutation, z its deviation in standard errors over the keys.
// The table goes to stderr, JSON to stdout. Results: docs/design/order.md.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <vector>

#include "permutation.hpp"

namespace {

constexpr int kHalfBits = 7;  // the right half of the 13 bits that n = 4097 and 5000 take

// Keys from another generator than the one under test: Steele, Lea, Flood, "Fast splittable generators", OOPSLA 2014.
std::uint64_t splitmix64(std::uint64_t& state) {
    state += 0x9E3779B97F4A7C15;
    std::uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

double chi_square_z(std::span<const std::uint64_t> seen, std::span<const double> expected) {
    double sum = 0;
    for (std::size_t i = 0; i < seen.size(); ++i) {
        const double difference = static_cast<double>(seen[i]) - expected[i];
        sum += difference * difference / expected[i];
    }
    const double df = static_cast<double>(seen.size() - 1);
    return (sum - df) / std::sqrt(2 * df);
}

std::size_t xor_of_halves(std::uint64_t x, std::uint64_t y, bool left) {
    return left ? (x ^ y) >> kHalfBits : (x ^ y) & ((1U << kHalfBits) - 1);
}

double uniform_z(std::span<const std::uint64_t> seen, std::uint64_t keys) {
    const std::vector<double> expected(seen.size(), static_cast<double>(keys) / static_cast<double>(seen.size()));
    return chi_square_z(seen, expected);
}

// For two different values drawn uniformly from [0, n): how often their left (or right) halves differ by each xor.
std::vector<double> xor_chances(std::uint64_t n, bool left) {
    std::vector<std::uint64_t> pairs(1U << kHalfBits);
    for (std::uint64_t x = 0; x < n; ++x)
        for (std::uint64_t y = 0; y < n; ++y)
            if (x != y) ++pairs[xor_of_halves(x, y, left)];
    std::vector<double> chances;
    for (const std::uint64_t count : pairs)
        chances.push_back(static_cast<double>(count) / (static_cast<double>(n) * static_cast<double>(n - 1)));
    return chances;
}

double xor_z(std::vector<std::uint64_t> seen, std::uint64_t n, bool left, std::uint64_t keys) {
    std::vector<double> expected = xor_chances(n, left);
    while (expected.back() == 0) expected.pop_back();
    seen.resize(expected.size());
    for (double& cell : expected) cell *= static_cast<double>(keys);
    return chi_square_z(seen, expected);
}

struct Scores {
    double place, step, order, left, right;
};

Scores measure(std::uint64_t n, int rounds, std::uint64_t a, std::uint64_t b, std::uint64_t keys) {
    std::vector<std::uint64_t> places(n), steps(n - 1);
    std::vector<std::uint64_t> left(1U << kHalfBits), right(1U << kHalfBits);
    std::uint64_t rising = 0;
    std::uint64_t state = n * 1000 + static_cast<std::uint64_t>(rounds);
    for (std::uint64_t i = 0; i < keys; ++i) {
        const std::uint64_t low = splitmix64(state);
        const mdata::Feistel feistel(n, {low, splitmix64(state)}, rounds);
        const std::uint64_t x = feistel.forward(a), y = feistel.forward(b);
        ++places[x];
        ++steps[(y + n - x) % n - 1];
        ++left[xor_of_halves(x, y, true)];
        ++right[xor_of_halves(x, y, false)];
        rising += x < y;
    }
    const double all = static_cast<double>(keys);
    return {uniform_z(places, keys), uniform_z(steps, keys), (2 * static_cast<double>(rising) - all) / std::sqrt(all),
            xor_z(left, n, true, keys), xor_z(right, n, false, keys)};
}

struct Kept {
    double excess, z;
};

// The relation over whole permutations; pairs of one key depend on each other, so the spread is taken over keys.
Kept measure_whole(std::uint64_t n, int rounds, std::uint64_t keys) {
    const std::vector<double> chances = xor_chances(n, true);
    double expected = 0;
    for (std::uint64_t i = 0; i < n; ++i)
        for (std::uint64_t j = i + (1U << kHalfBits); j < n; j += 1U << kHalfBits)
            expected += chances[xor_of_halves(i, j, true)];
    std::vector<std::uint64_t> values(n);
    double sum = 0, squares = 0;
    std::uint64_t state = n * 1000 + static_cast<std::uint64_t>(rounds);
    for (std::uint64_t key = 0; key < keys; ++key) {
        const std::uint64_t low = splitmix64(state);
        const mdata::Feistel feistel(n, {low, splitmix64(state)}, rounds);
        for (std::uint64_t i = 0; i < n; ++i) values[i] = feistel.forward(i) >> kHalfBits;
        std::uint64_t kept = 0;
        for (std::uint64_t i = 0; i < n; ++i)
            for (std::uint64_t j = i + (1U << kHalfBits); j < n; j += 1U << kHalfBits)
                kept += (values[i] ^ values[j]) == (i ^ j) >> kHalfBits;
        const double excess = static_cast<double>(kept) / expected - 1;
        sum += excess;
        squares += excess * excess;
    }
    const double all = static_cast<double>(keys);
    const double mean = sum / all;
    return {mean, mean / std::sqrt((squares / all - mean * mean) / all)};
}

}  // namespace

int main(int argc, char** argv) {
    const int log2_keys = argc > 1 ? std::atoi(argv[1]) : 22;
    const std::uint64_t keys = std::uint64_t{1} << log2_keys;
    struct Pair {
        const char* name;
        std::uint64_t a, b;
    };
    const Pair pairs[] = {{"neighbours", 0, 1}, {"equal right half", 5, 5 + 3 * 128}, {"equal left half", 129, 190}};
    std::fprintf(stderr, "%6s %6s  %-18s %9s %9s %9s %9s %9s\n", "n", "rounds", "pair", "place", "step", "order",
                 "left", "right");
    std::printf("[");
    const char* comma = "";
    for (const std::uint64_t n : {std::uint64_t{4097}, std::uint64_t{5000}})
        for (const int rounds : {4, 6, 8, 10, 12})
            for (const Pair& pair : pairs) {
                const Scores z = measure(n, rounds, pair.a, pair.b, keys);
                std::fprintf(stderr, "%6lu %6d  %-18s %9.1f %9.1f %9.1f %9.1f %9.1f\n", n, rounds, pair.name, z.place, z.step,
                             z.order, z.left, z.right);
                std::printf("%s\n{\"n\": %lu, \"rounds\": %d, \"pair\": \"%s\", \"keys\": %lu, \"place\": %.2f, "
                            "\"step\": %.2f, \"order\": %.2f, \"left\": %.2f, \"right\": %.2f}",
                            comma, n, rounds, pair.name, keys, z.place, z.step, z.order, z.left, z.right);
                comma = ",";
            }
    const int log2_tables = argc > 2 ? std::atoi(argv[2]) : 17;
    const std::uint64_t tables = std::uint64_t{1} << log2_tables;
    std::fprintf(stderr, "%6s %6s  %12s %9s\n", "n", "rounds", "excess", "z");
    for (const std::uint64_t n : {std::uint64_t{4097}, std::uint64_t{5000}})
        for (const int rounds : {4, 6, 8, 10, 12}) {
            const Kept kept = measure_whole(n, rounds, tables);
            std::fprintf(stderr, "%6lu %6d  %12.6f %9.1f\n", n, rounds, kept.excess, kept.z);
            std::printf(",\n{\"n\": %lu, \"rounds\": %d, \"pair\": \"all of equal right half\", \"keys\": %lu, "
                        "\"excess\": %.7f, \"z\": %.2f}",
                        n, rounds, tables, kept.excess, kept.z);
        }
    std::printf("\n]\n");
}
