// Which tokens of a text are masked: whole words and runs of them (n-grams), chosen as in Megatron's masked datasets.
//
// A candidate is a token, or a word with its continuation tokens. Candidates are shuffled; each draws how many
// consecutive ones it would mask, takes the most that fit the budget, and is skipped if none fits or one is already
// masked. A span is what one candidate masked. Spans follow each other without overlap, so they are stored under the
// number of their first candidate. The order of draws and the comparisons in double precision are Megatron's
// (masked_dataset.py), with one addition: a `Room` that spans must not exceed, which is unlimited in Megatron's order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <stdexcept>
#include <vector>

namespace mdata {

// What masking knows of a tokenizer. `continues[id]` is 1 for a token that goes on with a word.
struct MaskVocabulary {
    std::int64_t cls;
    std::int64_t sep;
    std::int64_t mask;
    std::vector<std::uint8_t> continues;
    std::vector<std::int64_t> ids;  // what a token can be replaced by

    bool is_continuation(std::int64_t id) const {
        return static_cast<std::uint64_t>(id) < continues.size() && continues[static_cast<std::size_t>(id)] != 0;
    }
};

// numpy's sum of an array of doubles, whose order of additions decides the last bits.
inline double pairwise_sum(std::span<const double> values) {
    const std::size_t n = values.size();
    if (n < 8) return std::accumulate(values.begin(), values.end(), 0.0);
    if (n > 128) {
        const std::size_t half = n / 2 - n / 2 % 8;
        return pairwise_sum(values.first(half)) + pairwise_sum(values.subspan(half));
    }
    double r[8];
    std::copy_n(values.begin(), 8, r);
    std::size_t i = 8;
    for (; i + 8 <= n; i += 8) {
        for (std::size_t k = 0; k < 8; ++k) r[k] += values[i + k];
    }
    double sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
    for (; i < n; ++i) sum += values[i];
    return sum;
}

struct MaskRule {
    double probability;  // share of tokens
    std::int64_t most_ngram;
    bool whole_words;
    bool geometric;  // how an n-gram's length is drawn; else by `bounds`
    bool permute;    // exchange as many tokens again for each other
    std::vector<double> bounds;

    MaskRule(double p, std::int64_t most, bool words, bool longer, bool from_geometric, bool exchange)
        : probability(p), most_ngram(most), whole_words(words), geometric(from_geometric), permute(exchange) {
        if (!(p > 0.0 && p < 1.0) || most < 1 || most > 65536) {
            throw std::invalid_argument("a probability outside of (0, 1), or n-grams outside of 1 to 65536");
        }
        if (geometric && permute) throw std::invalid_argument("geometric lengths and a permutation exclude each other");
        bounds.resize(static_cast<std::size_t>(most));
        for (std::size_t n = 0; n < bounds.size(); ++n) bounds[n] = 1.0 / static_cast<double>(n + 1);
        const auto divide = [this](double by) {
            for (double& bound : bounds) bound /= by;
        };
        // The original divides by the sum twice, the second time in the order asked for; then by the last running sum.
        divide(pairwise_sum(bounds));
        if (longer) std::reverse(bounds.begin(), bounds.end());
        divide(pairwise_sum(bounds));
        std::partial_sum(bounds.begin(), bounds.end(), bounds.begin());
        divide(bounds.back());
    }
};

// A span of n tokens takes n + 1 cells.
struct Room {
    std::int64_t spans = std::numeric_limits<std::int64_t>::max();
    std::int64_t cells = std::numeric_limits<std::int64_t>::max();
};

// One text's masking; made once and used for many, so that nothing is allocated for each.
class Masking {
public:
    Masking(const MaskVocabulary& vocabulary, const MaskRule& rule) : vocabulary_(vocabulary), rule_(rule) {}

    // `replace(generator, id)` gives what stands in the place of a masked token.
    template <typename Generator, typename Replace>
    void run(std::span<const std::int64_t> ids, std::int64_t target, Room room, Generator& generator, Replace&& replace) {
        find_candidates(ids);
        masked_.assign(ids.begin(), ids.end());
        const double share = rule_.probability * static_cast<double>(target);
        budget_ = std::min(share, std::max(1.0, std::nearbyint(static_cast<double>(ids.size()) * rule_.probability)));
        generator.shuffle(std::span(order_));
        std::int64_t taken = 0, spans = 0;
        for (const std::int32_t candidate : order_) {
            if (static_cast<double>(taken) >= budget_) break;
            const std::size_t stop = longest_fit(candidate, draw_length(generator), taken);
            const auto first = static_cast<std::size_t>(candidate);
            if (stop == first || is_used(first, stop)) continue;
            const std::int64_t tokens = starts_[stop] - starts_[first];
            if (spans >= room.spans || tokens + taken + spans + 1 > room.cells) continue;
            std::fill(used_.begin() + candidate, used_.begin() + static_cast<std::ptrdiff_t>(stop), std::uint8_t{1});
            span_stops_[first] = static_cast<std::int32_t>(stop);
            for (const std::int32_t place : places_of(first, stop)) {
                masked_[static_cast<std::size_t>(place)] = replace(generator, ids[static_cast<std::size_t>(place)]);
            }
            taken += tokens;
            spans += 1;
        }
        num_spans_ = spans;
        if (rule_.permute) permute(generator);
    }

    std::span<const std::int64_t> masked() const { return masked_; }
    std::int64_t num_spans() const { return num_spans_; }

    // The places of each span, in ascending order: visit(places).
    template <typename Visit>
    void each_span(Visit&& visit) const {
        for (std::size_t c = 0; c < order_.size(); ++c) {
            if (span_stops_[c] != 0) visit(places_of(c, static_cast<std::size_t>(span_stops_[c])));
        }
    }

    // The places that were exchanged, ascending.
    std::span<const std::int32_t> exchanged() const { return exchanged_; }

private:
    void find_candidates(std::span<const std::int64_t> ids) {
        places_.clear();
        starts_.clear();
        for (std::size_t i = 0; i < ids.size(); ++i) {
            if (ids[i] == vocabulary_.cls || ids[i] == vocabulary_.sep) continue;
            const bool joins = rule_.whole_words && !starts_.empty() && vocabulary_.is_continuation(ids[i]);
            if (!joins) starts_.push_back(static_cast<std::int32_t>(places_.size()));
            places_.push_back(static_cast<std::int32_t>(i));
        }
        order_.resize(starts_.size());
        std::iota(order_.begin(), order_.end(), 0);
        starts_.push_back(static_cast<std::int32_t>(places_.size()));
        used_.assign(order_.size(), 0);
        span_stops_.assign(order_.size(), 0);
        exchanged_.clear();
    }

    template <typename Generator>
    std::size_t draw_length(Generator& generator) const {
        if (rule_.geometric) return static_cast<std::size_t>(std::min(generator.geometric(0.2), rule_.most_ngram));
        return 1 + generator.pick(rule_.bounds);
    }

    // Where the longest run from `candidate` ends that has `most` candidates or fewer and does not exceed the budget;
    // `candidate` itself if there is none.
    std::size_t longest_fit(std::int32_t candidate, std::size_t most, std::int64_t taken) const {
        const auto first = static_cast<std::size_t>(candidate);
        std::size_t stop = std::min(first + most, order_.size());
        while (stop > first && static_cast<double>(taken + starts_[stop] - starts_[first]) > budget_) --stop;
        return stop;
    }

    bool is_used(std::size_t first, std::size_t stop) const {
        return std::find(used_.begin() + static_cast<std::ptrdiff_t>(first), used_.begin() + static_cast<std::ptrdiff_t>(stop),
                         std::uint8_t{1}) != used_.begin() + static_cast<std::ptrdiff_t>(stop);
    }

    std::span<const std::int32_t> places_of(std::size_t first, std::size_t stop) const {
        const auto from = static_cast<std::size_t>(starts_[first]);
        return std::span(places_).subspan(from, static_cast<std::size_t>(starts_[stop]) - from);
    }

    // As many tokens as can be masked, none of them masked, in n-grams again, change places with each other.
    template <typename Generator>
    void permute(Generator& generator) {
        generator.shuffle(std::span(order_));
        for (const std::int32_t candidate : order_) {
            const auto taken = static_cast<std::int64_t>(exchanged_.size());
            if (static_cast<double>(taken) >= budget_) break;
            const std::size_t stop = longest_fit(candidate, draw_length(generator), taken);
            const auto first = static_cast<std::size_t>(candidate);
            if (stop == first || is_used(first, stop)) continue;
            std::fill(used_.begin() + candidate, used_.begin() + static_cast<std::ptrdiff_t>(stop), std::uint8_t{1});
            const auto places = places_of(first, stop);
            exchanged_.insert(exchanged_.end(), places.begin(), places.end());
        }
        std::sort(exchanged_.begin(), exchanged_.end());
        shuffled_ = exchanged_;
        generator.shuffle(std::span(shuffled_));
        before_ = masked_;
        for (std::size_t i = 0; i < exchanged_.size(); ++i) {
            masked_[static_cast<std::size_t>(exchanged_[i])] = before_[static_cast<std::size_t>(shuffled_[i])];
        }
    }

    const MaskVocabulary& vocabulary_;
    const MaskRule& rule_;
    double budget_ = 0;
    std::int64_t num_spans_ = 0;
    std::vector<std::int64_t> masked_, before_;
    std::vector<std::int32_t> places_;       // of all candidates' tokens, one candidate after another
    std::vector<std::int32_t> starts_;       // in places_, of each candidate, and one past the last
    std::vector<std::int32_t> order_;        // candidates as shuffled
    std::vector<std::int32_t> span_stops_;   // 0: no span begins with this candidate
    std::vector<std::uint8_t> used_;
    std::vector<std::int32_t> exchanged_, shuffled_;
};

}  // namespace mdata
