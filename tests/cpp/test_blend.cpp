// Known answers, the bound on the deviation, inverse, and the ends of the range.
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "blend.hpp"
#include "check.hpp"

namespace {

using Weights = std::vector<std::uint64_t>;

void known_answers() {
    const mdata::BlendTree tree(Weights{7, 3});
    const std::array<std::size_t, 10> components{0, 1, 0, 0, 1, 0, 0, 0, 1, 0};
    for (std::uint64_t k = 0; k < 20; ++k) CHECK(tree.locate(k).component == components[k % 10]);
    CHECK(tree.locate(14).component == 1 && tree.locate(14).sample == 4);
    const mdata::BlendTree alone(Weights{5});
    CHECK(alone.locate(123).component == 0 && alone.locate(123).sample == 123);
}

// counts follow locate, stay within 1.68 of the exact share, are exact at the sum of weights; inverse undoes locate.
void check_blend(const Weights& weights, std::uint64_t num_samples) {
    const mdata::BlendTree tree(weights);
    std::uint64_t sum = 0;
    for (const std::uint64_t weight : weights) sum += weight;
    Weights seen(weights.size()), counts(weights.size());
    bool located = true, inverted = true, counted = true, near = true, exact = true;
    for (std::uint64_t k = 0; k < num_samples; ++k) {
        tree.counts(k, counts);
        counted = counted && counts == seen;
        for (std::size_t i = 0; i < weights.size(); ++i) {
            const long double share = static_cast<long double>(k) * static_cast<long double>(weights[i]) /
                                      static_cast<long double>(sum);
            const long double deviation = static_cast<long double>(seen[i]) - share;
            near = near && deviation < 1.68L && deviation > -1.68L;
            exact = exact && (k % sum != 0 || seen[i] == k / sum * weights[i]);
        }
        const mdata::BlendTree::Place place = tree.locate(k);
        located = located && place.sample == seen[place.component];
        inverted = inverted && tree.inverse(place) == k;
        ++seen[place.component];
    }
    CHECK(located);
    CHECK(inverted);
    CHECK(counted);
    CHECK(near);
    CHECK(exact);
}

void the_ends_of_the_range() {
    const std::uint64_t half = std::uint64_t{1} << 61;
    const mdata::BlendTree tree(Weights{half, half - 1, 1});
    Weights counts(3);
    tree.counts(2 * half, counts);
    CHECK((counts == Weights{half, half - 1, 1}));
    for (const std::uint64_t k : {2 * half, 2 * half - 1, half, half + 1}) CHECK(tree.inverse(tree.locate(k)) == k);
    CHECK_THROWS(std::overflow_error, tree.locate(2 * half + 1));
    CHECK_THROWS(std::overflow_error, tree.inverse({2, 2}));
    CHECK_THROWS(std::out_of_range, tree.inverse({3, 0}));
    CHECK_THROWS(std::overflow_error, mdata::BlendTree(Weights{half, half, 1}));
    CHECK_THROWS(std::overflow_error, mdata::BlendTree(Weights{~std::uint64_t{0}, 1}));
    CHECK_THROWS(std::invalid_argument, mdata::BlendTree(Weights{1, 0, 2}));
    CHECK_THROWS(std::invalid_argument, mdata::BlendTree(Weights{}));
}

void refuses_negative_entries() {
    const mdata::BlendTree tree(Weights{7, 3});
    const std::array<std::int64_t, 1> in{-1};
    std::array<std::int64_t, 1> out{}, more{};
    CHECK_THROWS(std::out_of_range, tree.locate(in, out, more));
    CHECK_THROWS(std::out_of_range, tree.inverse(in, out, more));
}

}  // namespace

int main() {
    known_answers();
    the_ends_of_the_range();
    refuses_negative_entries();
    check_blend({1}, 10);
    check_blend({7, 3}, 100);
    check_blend({1, 1, 1, 1, 1, 1, 1}, 100);
    check_blend({1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144}, 1200);
    check_blend({1000003, 17, 999, 123456, 1, 500000}, 3000);
    return check::finish("blend");
}
