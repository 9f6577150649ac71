// The fast fill against the loop over all components, with and without wide vectors, for weights that suit it badly.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "check.hpp"
#include "megatron_blend.hpp"

namespace {

using Doubles = std::vector<double>;
using Counts = std::vector<std::int64_t>;

struct Blend {
    Counts components, samples;
    bool operator==(const Blend&) const = default;
};

Blend loop(const Doubles& weights, const Counts& limits, std::int64_t num_samples) {
    Blend found;
    Counts counts(weights.size());
    for (std::int64_t t = 0; t < num_samples; ++t) {
        const double m = static_cast<double>(std::max<std::int64_t>(t, 1));
        std::size_t best = weights.size();
        double largest = 0;
        for (std::size_t i = 0; i < weights.size(); ++i) {
            if (!limits.empty() && counts[i] == limits[i]) continue;
            const double product = weights[i] * m;
            const double error = product - static_cast<double>(counts[i]);
            if (best == weights.size() || error > largest) {
                best = i;
                largest = error;
            }
        }
        found.components.push_back(static_cast<std::int64_t>(best));
        found.samples.push_back(counts[best]++);
    }
    return found;
}

void check_equal(const Doubles& weights, const Counts& limits, std::int64_t num_samples) {
    const Blend expected = loop(weights, limits, num_samples);
    for (const bool wide : {false, mdata::has_wide_vectors()}) {
        const auto size = static_cast<std::size_t>(num_samples);
        Blend found{Counts(size), Counts(size)};
        mdata::GreedyFill fill(weights, limits, num_samples, wide);
        fill.run(std::span(found.components), std::span(found.samples));
        CHECK(found == expected);
    }
}

double real(std::uint64_t& state) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    return static_cast<double>(state >> 11) / 9007199254740992.0;
}

}  // namespace

int main() {
    std::uint64_t state = 7;
    for (const std::size_t n : {1U, 2U, 5U, 16U, 17U, 63U, 65U, 130U, 300U, 700U}) {
        for (int kind = 0; kind < 8; ++kind) {
            Doubles weights;
            for (std::size_t i = 0; i < n; ++i) {
                const auto rank = static_cast<double>(i + 1);
                const double u = real(state);
                const Doubles kinds = {u, 1.0, 1.0 / rank, 1.0 / (rank * rank), 1.0 + 1e-12 * u, std::floor(1 + 5 * u), 1e-300 * u,
                                       i < 3 ? 100 + u : 0.01 * (0.5 + u)};
                weights.push_back(kinds[static_cast<std::size_t>(kind)]);
            }
            double sum = 0;
            for (const double weight : weights) sum += weight;
            Doubles shares = weights;
            for (double& share : shares) share /= sum;
            check_equal(shares, {}, 3000);
            check_equal(weights, {}, 500);
        }
        Counts sizes;
        for (std::size_t i = 0; i < n; ++i) sizes.push_back(static_cast<std::int64_t>(90 * real(state)) * (i % 3 == 0 ? 1 : 3));
        std::int64_t total = 0;
        for (const std::int64_t size : sizes) total += size;
        Doubles shares;
        for (const std::int64_t size : sizes) shares.push_back(static_cast<double>(size) / static_cast<double>(total));
        if (total > 0) check_equal(shares, sizes, total);
        // Limits that have nothing to do with the weights.
        Doubles others;
        for (std::size_t i = 0; i < n; ++i) others.push_back(real(state) * 2 / static_cast<double>(n));
        if (total > 0) check_equal(others, sizes, total);
    }
    check_equal({-0.5, 1.5}, {}, 100);
    check_equal({0.0, 1.0, 0.0}, {}, 100);
    check_equal({1e300, 1e300, 2.0}, {}, 100);
    check_equal({-1.7e308, -1.7e308}, {}, 1);
    CHECK_THROWS(std::invalid_argument, mdata::GreedyFill(Doubles{0.5, 0.5}, Counts{1, 1}, 3));
    return check::finish("megatron_blend");
}
