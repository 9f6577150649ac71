// Which component gives sample k of a blend, and which of its samples: a Huffman tree over integer weights.
//
// At a node of weight W whose left child weighs w, the first n samples hold L(n) = floor((2 n w + W) / (2 W)) on the
// left, in 128 bits: n w / W rounded to the nearest. Every component's count is within 1.68 of its exact share at
// every prefix, exact at every multiple of the sum of weights; locate and its inverse take O(depth). No state, so the
// cursors of a blend are the function counts(k). Why: docs/design/order.md. Slow twin: tests/reference/blend.py.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

namespace mdata {

class BlendTree {
public:
    static constexpr std::uint64_t kLargestSum = std::uint64_t{1} << 62;
    static constexpr std::uint64_t kLargestSample = std::uint64_t{1} << 62;

    struct Place {
        std::size_t component;
        std::uint64_t sample;  // number inside the component
    };

    explicit BlendTree(std::span<const std::uint64_t> weights) : num_components_(weights.size()) {
        check(weights);
        nodes_.reserve(2 * weights.size() - 1);
        for (const std::uint64_t weight : weights) nodes_.push_back({weight, kNone, kNone, kNone});
        merge_lightest();
    }

    std::size_t num_components() const { return num_components_; }

    Place locate(std::uint64_t k) const {
        check_sample(k);
        std::size_t at = root();
        while (at >= num_components_) {
            const Node& node = nodes_[at];
            const std::uint64_t before = left_count(node, k);
            const bool left = left_count(node, k + 1) != before;
            k = left ? before : k - before;
            at = left ? node.left : node.right;
        }
        return {at, k};
    }

    void locate(std::span<const std::int64_t> ks, std::span<std::int64_t> components,
                std::span<std::int64_t> samples) const {
        for (std::size_t i = 0; i < ks.size(); ++i) {
            const Place place = locate(not_negative(ks[i]));
            components[i] = static_cast<std::int64_t>(place.component);
            samples[i] = static_cast<std::int64_t>(place.sample);
        }
    }

    void inverse(std::span<const std::int64_t> components, std::span<const std::int64_t> samples,
                 std::span<std::int64_t> ks) const {
        for (std::size_t i = 0; i < ks.size(); ++i) {
            const Place place{static_cast<std::size_t>(not_negative(components[i])), not_negative(samples[i])};
            ks[i] = static_cast<std::int64_t>(inverse(place));
        }
    }

    // How many of the first k samples each component gives; counts.size() == num_components().
    void counts(std::uint64_t k, std::span<std::uint64_t> counts) const {
        check_sample(k);
        std::vector<std::uint64_t> first(nodes_.size());
        first[root()] = k;
        // A parent is made after its children, so going down the numbers visits it before them.
        for (std::size_t at = root(); at >= num_components_; --at) {
            const Node& node = nodes_[at];
            first[node.left] = left_count(node, first[at]);
            first[node.right] = first[at] - first[node.left];
        }
        std::copy_n(first.begin(), num_components_, counts.begin());
    }

    // The blend's sample that is this component's sample: locate's inverse.
    std::uint64_t inverse(Place place) const {
        if (place.component >= num_components_) throw std::out_of_range("no such component");
        std::uint64_t sample = place.sample;
        check_sample(sample);
        for (std::size_t at = place.component; nodes_[at].parent != kNone; at = nodes_[at].parent) {
            const Node& parent = nodes_[nodes_[at].parent];
            sample = at == parent.left ? left_inverse(parent, sample) : right_inverse(parent, sample);
            check_sample(sample);
        }
        return sample;
    }

private:
    using Wide = unsigned __int128;
    static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

    struct Node {
        std::uint64_t weight;
        std::size_t left, right, parent;
    };

    std::size_t root() const { return nodes_.size() - 1; }

    static void check(std::span<const std::uint64_t> weights) {
        if (weights.empty()) throw std::invalid_argument("a blend needs at least one component");
        std::uint64_t sum = 0;
        for (const std::uint64_t weight : weights) {
            if (weight == 0) throw std::invalid_argument("a weight is 0");
            if (weight > kLargestSum - sum) throw std::overflow_error("the weights sum to more than 2^62");
            sum += weight;
        }
    }

    static std::uint64_t not_negative(std::int64_t x) {
        if (x < 0) throw std::out_of_range("an entry is negative");
        return static_cast<std::uint64_t>(x);
    }

    static void check_sample(std::uint64_t k) {
        if (k > kLargestSample) throw std::overflow_error("a sample number is above 2^62");
    }

    // Leaves are numbered by component, inner nodes in the order in which they are made. The lightest two nodes
    // are joined, the lower number first among equals; the lightest is the left child.
    void merge_lightest() {
        using Entry = std::pair<std::uint64_t, std::size_t>;
        std::priority_queue<Entry, std::vector<Entry>, std::greater<>> lightest;
        for (std::size_t i = 0; i < nodes_.size(); ++i) lightest.emplace(nodes_[i].weight, i);
        while (lightest.size() > 1) {
            const Entry left = lightest.top();
            lightest.pop();
            const Entry right = lightest.top();
            lightest.pop();
            const std::size_t parent = nodes_.size();
            nodes_.push_back({left.first + right.first, left.second, right.second, kNone});
            nodes_[left.second].parent = parent;
            nodes_[right.second].parent = parent;
            lightest.emplace(nodes_[parent].weight, parent);
        }
    }

    // n <= 2^62 + 1 and every weight <= 2^62, so each product below is under 2^126.
    std::uint64_t left_count(const Node& node, std::uint64_t n) const {
        const Wide weight = node.weight;
        return static_cast<std::uint64_t>((Wide{2} * n * nodes_[node.left].weight + weight) / (2 * weight));
    }

    // The n with L(n) = j and L(n + 1) = j + 1: the least m = n + 1 with m >= W (2 j + 1) / (2 w).
    std::uint64_t left_inverse(const Node& node, std::uint64_t j) const {
        const Wide twice = 2 * Wide{nodes_[node.left].weight};
        return bounded((Wide{node.weight} * (2 * Wide{j} + 1) + twice - 1) / twice - 1);
    }

    // The same on the right, where n - L(n) = ceil((2 n r - W) / (2 W)): the least m with 2 m r > W (2 j + 1).
    std::uint64_t right_inverse(const Node& node, std::uint64_t j) const {
        return bounded(Wide{node.weight} * (2 * Wide{j} + 1) / (2 * Wide{nodes_[node.right].weight}));
    }

    static std::uint64_t bounded(Wide k) {
        if (k > kLargestSample) throw std::overflow_error("a sample number is above 2^62");
        return static_cast<std::uint64_t>(k);
    }

    std::size_t num_components_;
    std::vector<Node> nodes_;
};

}  // namespace mdata
