// Megatron's greedy construction of a blend: sample t goes to the component whose error w_i m - c_i is largest, m =
// max(t, 1), c_i its samples so far, the lowest number among equals; equal bit for bit, so the product is rounded
// before the subtraction (no fused multiply-add: this is compiled with -ffp-contract=off).
//
// The original examines every component for every sample. Here most are ruled out for many samples at once, exactly:
// the error of a component that is not drawn never falls (weights are not negative, and rounding is monotone). So let L
// be a level and take those components whose error, if they are not drawn, is at least L at the last of the next b
// samples. As long as the largest error of these is at least L, it is the largest of all. When it is not, L is lowered
// and other components are taken. Otherwise L rises slowly towards the largest error, so that few are taken (about b +
// sqrt(n)); its value affects only the time. With many components some are taken for long, and of these a few for
// short. Components of equal weight take turns, so they are one entry here. Slow twin:
// tests/reference/megatron_blend.py.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <stdexcept>
#include <vector>

#include "wide.hpp"

namespace mdata {

namespace greedy {

constexpr std::size_t kPadding = 8;  // fields are filled up to a multiple of this by entries that never win
constexpr double kSpent = std::numeric_limits<double>::infinity();
constexpr double kNever = -kSpent;

inline double target(std::int64_t t) { return static_cast<double>(std::max<std::int64_t>(t, 1)); }

// A component, or some of one weight and limit that take turns: of these the one whose turn it is.
struct Entry {
    std::int64_t samples;  // so far
    std::int64_t limit;    // of samples; never reached where there is none
    std::int32_t component;
    std::uint32_t first_member;
    std::uint32_t num_members;
    std::uint32_t turn;
};

// The numbers by which entries are compared; `places` are those in the wider field from which they were taken.
struct Field {
    std::vector<double> weights;
    std::vector<double> counts;  // samples so far; kSpent at the limit
    std::vector<std::uint32_t> places;
    std::size_t size = 0;

    // Writing goes on for up to kPadding numbers behind the last.
    explicit Field(std::size_t room) : weights(room + 2 * kPadding), counts(weights.size()), places(weights.size()) {}

    std::size_t padded() const { return (size + kPadding - 1) / kPadding * kPadding; }

    void pad() {
        for (std::size_t i = size; i < size + kPadding; ++i) {
            weights[i] = 0.0;
            counts[i] = kSpent;
            places[i] = 0;
        }
    }
};

// The few out of the middle field, which was taken out of all; a count stands in each of the three. Bare pointers, since
// one more look at a vector for each sample would be seen on the clock.
struct Race {
    const double* weights;
    double* counts;
    const std::uint32_t* places;
    std::size_t size;
    const std::uint32_t* middle_places;
    double* middle_counts;
    double* all_counts;
    Entry* entries;
    const std::int32_t* members;
    double* room;  // for half as many as the few

    Race(Field& few, Field& middle, Field& all, std::vector<Entry>& all_entries,
         const std::vector<std::int32_t>& all_members, std::vector<double>& all_room)
        : weights(few.weights.data()), counts(few.counts.data()), places(few.places.data()), size(few.size),
          middle_places(middle.places.data()), middle_counts(middle.counts.data()), all_counts(all.counts.data()),
          entries(all_entries.data()), members(all_members.data()), room(all_room.data()) {}

    std::size_t padded() const { return (size + kPadding - 1) / kPadding * kPadding; }
    Entry& entry_at(std::size_t place) const { return entries[middle_places[places[place]]]; }

    void set_count(std::size_t place, double count) const {
        const std::uint32_t in_middle = places[place];
        middle_counts[in_middle] = count;
        all_counts[middle_places[in_middle]] = count;
    }
};

// The samples of a sprint and where they are written.
template <typename Component>
struct Track {
    std::int64_t first;
    std::size_t steps;
    double level;  // it stops where the largest error is below
    Component* components;
    std::int64_t* samples;

    double target_of(std::size_t step) const { return target(first + static_cast<std::int64_t>(step)); }

    void write(std::size_t step, const Entry& entry) const {
        components[step] = static_cast<Component>(entry.component);
        samples[step] = entry.samples;
    }

    Track from(std::size_t step, std::size_t num_steps) const {
        return {first + static_cast<std::int64_t>(step), num_steps, level, components + step, samples + step};
    }
};

// How many samples were drawn, and the largest error that was seen last.
struct Sprint {
    std::size_t steps;
    double largest;
};

// Whether a sample does nothing but add one to the count.
inline bool is_plain(const Entry& entry) { return entry.num_members == 1 && entry.samples + 1 != entry.limit; }

// A sample of a plain entry whose own count has gone up.
template <typename Component>
inline void draw_plain(const Race& race, const Track<Component>& track, std::size_t step, std::size_t place) {
    Entry& entry = race.entry_at(place);
    track.write(step, entry);
    race.set_count(place, static_cast<double>(++entry.samples));
}

// A sample of any entry.
template <typename Component>
inline void draw(const Race& race, const Track<Component>& track, std::size_t step, std::size_t place) {
    Entry& entry = race.entry_at(place);
    track.write(step, entry);
    if (++entry.turn == entry.num_members) {
        entry.turn = 0;
        race.counts[place] = ++entry.samples == entry.limit ? kSpent : static_cast<double>(entry.samples);
        race.set_count(place, race.counts[place]);
    }
    entry.component = race.members[entry.first_member + entry.turn];
}

// The entries whose errors reach the level at m.
inline void select_plain(const Field& wide, double m, double level, Field& small) {
    std::size_t found = 0;
    for (std::size_t i = 0; i < wide.size; ++i) {
        small.weights[found] = wide.weights[i];
        small.counts[found] = wide.counts[i];
        small.places[found] = static_cast<std::uint32_t>(i);
        found += wide.weights[i] * m - wide.counts[i] >= level ? 1 : 0;
    }
    small.size = found;
}

// The next samples, one after another, until the largest error is below the level.
template <typename Component>
inline Sprint sprint_plain(const Race& race, const Track<Component>& track) {
    double largest = kNever;
    for (std::size_t step = 0; step < track.steps; ++step) {
        const double m = track.target_of(step);
        largest = kNever;
        std::size_t best = 0;
        for (std::size_t i = 0; i < race.size; ++i) {
            const double error = race.weights[i] * m - race.counts[i];
            if (error < largest) continue;
            if (error == largest && race.entry_at(i).component > race.entry_at(best).component) continue;
            largest = error;
            best = i;
        }
        if (largest < track.level) return {step, largest};
        draw(race, track, step, best);
    }
    return {track.steps, largest};
}

#if defined(__x86_64__)

// For each set of four lanes the shuffle of 32-bit numbers that moves numbers of 64 bits to the front.
constexpr auto kFronts = [] {
    std::array<std::array<std::uint32_t, 8>, 16> fronts{};
    for (std::uint32_t lanes = 0; lanes < 16; ++lanes) {
        std::size_t to = 0;
        for (std::uint32_t half = 0; half < 8; ++half) {
            if ((lanes >> half / 2 & 1) != 0) fronts[lanes][to++] = half;
        }
    }
    return fronts;
}();

MDATA_FOR_AVX2 inline __m256d to_front(__m256d numbers, __m256i front) {
    return _mm256_castsi256_pd(_mm256_permutevar8x32_epi32(_mm256_castpd_si256(numbers), front));
}

MDATA_FOR_AVX2 inline void select_wide(const Field& wide, double m, double level, Field& small) {
    // Read once: for all the compiler knows, what is stored below changes these pointers.
    const double* const weights = wide.weights.data();
    const double* const counts = wide.counts.data();
    double* const to_weights = small.weights.data();
    double* const to_counts = small.counts.data();
    std::uint32_t* const to_places = small.places.data();
    const std::size_t padded = wide.padded();
    const __m256d ms = _mm256_set1_pd(m);
    const __m256d levels = _mm256_set1_pd(level);
    const __m256i evens = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
    __m256i at = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    std::size_t found = 0;
    for (std::size_t i = 0; i < padded; i += 4, at = _mm256_add_epi32(at, _mm256_set1_epi32(4))) {
        const __m256d weight = _mm256_loadu_pd(weights + i);
        const __m256d count = _mm256_loadu_pd(counts + i);
        const __m256d errors = _mm256_sub_pd(_mm256_mul_pd(weight, ms), count);
        const auto lanes = static_cast<unsigned>(_mm256_movemask_pd(_mm256_cmp_pd(errors, levels, _CMP_GE_OQ)));
        const __m256i front = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kFronts[lanes].data()));
        const __m256i places = _mm256_permutevar8x32_epi32(_mm256_permutevar8x32_epi32(at, front), evens);
        _mm256_storeu_pd(to_weights + found, to_front(weight, front));
        _mm256_storeu_pd(to_counts + found, to_front(count, front));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to_places + found), _mm256_castsi256_si128(places));
        found += static_cast<std::size_t>(std::popcount(lanes));
    }
    small.size = found;
}

MDATA_FOR_AVX2 inline __m256d errors_at(const Race& race, std::size_t i, __m256d m) {
    const __m256d product = _mm256_mul_pd(_mm256_loadu_pd(race.weights + i), m);
    return _mm256_sub_pd(product, _mm256_loadu_pd(race.counts + i));
}

// The largest of four numbers, in all lanes.
MDATA_FOR_AVX2 inline __m256d largest_of(__m256d numbers) {
    numbers = _mm256_max_pd(numbers, _mm256_permute2f128_pd(numbers, numbers, 1));
    return _mm256_max_pd(numbers, _mm256_permute_pd(numbers, 5));
}

// Of the places in a set that of the lowest component.
inline std::size_t lowest(const Race& race, std::uint64_t places) {
    auto best = static_cast<std::size_t>(std::countr_zero(places));
    while ((places &= places - 1) != 0) {
        const auto other = static_cast<std::size_t>(std::countr_zero(places));
        if (race.entry_at(other).component < race.entry_at(best).component) best = other;
    }
    return best;
}

// A sprint of as many vectors as there are. Counts stay in registers (of up to 8 vectors): a number that is written
// alone is waited for when it is read with its neighbours. What else is written is not waited for.
template <std::size_t kNumVectors, typename Component>
MDATA_FOR_AVX2 inline Sprint sprint_few(const Race& race, const Track<Component>& track) {
    const double* const weights = race.weights;
    double* const kept = race.counts;
    const __m256d ones = _mm256_set1_pd(1.0);
    __m256d best = ones;
    __m256d counts[kNumVectors];
#pragma GCC unroll 16  // else it is compiled to a copy by half vectors, which stalls the loads of whole ones
    for (std::size_t k = 0; k < kNumVectors; ++k) counts[k] = _mm256_loadu_pd(kept + 4 * k);
    for (std::size_t step = 0; step < track.steps; ++step) {
        const __m256d m = _mm256_set1_pd(track.target_of(step));
        __m256d errors[kNumVectors];
        __m256d tops[kNumVectors];
        for (std::size_t k = 0; k < kNumVectors; ++k) {
            tops[k] = errors[k] = _mm256_sub_pd(_mm256_mul_pd(_mm256_loadu_pd(weights + 4 * k), m), counts[k]);
        }
        for (std::size_t n = kNumVectors; n > 1; n = (n + 1) / 2) {
            for (std::size_t k = 0; k < n / 2; ++k) tops[k] = _mm256_max_pd(tops[k], tops[k + (n + 1) / 2]);
        }
        best = largest_of(tops[0]);
        if (_mm256_cvtsd_f64(best) < track.level) return {step, _mm256_cvtsd_f64(best)};
        std::uint64_t places = 0;
        for (std::size_t k = 0; k < kNumVectors; ++k) {
            const auto equal = _mm256_movemask_pd(_mm256_cmp_pd(errors[k], best, _CMP_EQ_OQ));
            places |= static_cast<std::uint64_t>(equal) << (4 * k);
        }
        const auto place = static_cast<std::size_t>(std::countr_zero(places));
        if ((places & (places - 1)) == 0 && is_plain(race.entry_at(place))) {
            for (std::size_t k = 0; k < kNumVectors; ++k) {
                const __m256d equal = _mm256_cmp_pd(errors[k], best, _CMP_EQ_OQ);
                // The sum does not wait for the winner to be known.
                counts[k] = _mm256_blendv_pd(counts[k], _mm256_add_pd(counts[k], ones), equal);
            }
            draw_plain(race, track, step, place);
        } else {
            for (std::size_t k = 0; k < kNumVectors; ++k) _mm256_storeu_pd(kept + 4 * k, counts[k]);
            draw(race, track, step, lowest(race, places));
            for (std::size_t k = 0; k < kNumVectors; ++k) counts[k] = _mm256_loadu_pd(kept + 4 * k);
        }
    }
    return {track.steps, _mm256_cvtsd_f64(best)};
}

// A sprint of any number, by blocks of two vectors: the largest error, the block in which it is, its place in the block.
template <typename Component>
MDATA_FOR_AVX2 inline Sprint sprint_many(const Race& race, const Track<Component>& track) {
    const __m256d ones = _mm256_set1_pd(1.0);
    __m256d best = ones;
    for (std::size_t step = 0; step < track.steps; ++step) {
        const __m256d m = _mm256_set1_pd(track.target_of(step));
        best = _mm256_set1_pd(kNever);
        for (std::size_t i = 0; i < race.padded(); i += 8) {
            const __m256d top = _mm256_max_pd(errors_at(race, i, m), errors_at(race, i + 4, m));
            _mm256_storeu_pd(race.room + i / 2, top);
            best = _mm256_max_pd(best, top);
        }
        best = largest_of(best);
        if (_mm256_cvtsd_f64(best) < track.level) return {step, _mm256_cvtsd_f64(best)};
        std::size_t block = 0, num_blocks = 0;
        for (std::size_t i = 0; i < race.padded(); i += 8) {
            const __m256d equal = _mm256_cmp_pd(_mm256_loadu_pd(race.room + i / 2), best, _CMP_EQ_OQ);
            const bool here = _mm256_movemask_pd(equal) != 0;
            block = here ? i : block;
            num_blocks += here ? 1 : 0;
        }
        const __m256d one = _mm256_cmp_pd(errors_at(race, block, m), best, _CMP_EQ_OQ);
        const __m256d two = _mm256_cmp_pd(errors_at(race, block + 4, m), best, _CMP_EQ_OQ);
        const auto places = static_cast<unsigned>(_mm256_movemask_pd(one) | _mm256_movemask_pd(two) << 4);
        const std::size_t place = block + static_cast<std::size_t>(std::countr_zero(places));
        if (num_blocks == 1 && (places & (places - 1)) == 0 && is_plain(race.entry_at(place))) {
            double* const counts = race.counts + block;
            _mm256_storeu_pd(counts, _mm256_add_pd(_mm256_loadu_pd(counts), _mm256_and_pd(one, ones)));
            _mm256_storeu_pd(counts + 4, _mm256_add_pd(_mm256_loadu_pd(counts + 4), _mm256_and_pd(two, ones)));
            draw_plain(race, track, step, place);
        } else {
            sprint_plain(race, track.from(step, 1));
        }
    }
    return {track.steps, _mm256_cvtsd_f64(best)};
}

template <std::size_t kNumVectors = 2, typename Component>
inline Sprint sprint_wide(const Race& race, const Track<Component>& track) {
    if constexpr (kNumVectors > 16) {
        return sprint_many(race, track);
    } else {
        if (race.size <= 4 * kNumVectors) return sprint_few<kNumVectors>(race, track);
        return sprint_wide<kNumVectors + 2>(race, track);
    }
}

#else

constexpr auto select_wide = select_plain;

template <typename Component>
inline Sprint sprint_wide(const Race& race, const Track<Component>& track) {
    return sprint_plain(race, track);
}

#endif

}  // namespace greedy

// The fill of one blend. Weights are finite; with `limits`, component i gives at most limits[i] samples.
class GreedyFill {
public:
    GreedyFill(std::span<const double> weights, std::span<const std::int64_t> limits, std::int64_t num_samples,
               bool wide = has_wide_vectors())
        : wide_(wide), end_(num_samples), all_(weights.size()), middle_(weights.size()), few_(weights.size()) {
        check(weights, limits, num_samples);
        const bool fast = orderly(weights);
        const auto limit = [&](std::size_t i) { return limits.empty() ? kNoLimit : limits[i]; };
        std::vector<std::size_t> order(weights.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        if (fast) {
            std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
                return weights[a] != weights[b] ? weights[a] < weights[b] : limit(a) < limit(b);
            });
        }
        for (std::size_t i = 0; i < order.size(); ++i) {
            const std::size_t component = order[i];
            members_.push_back(static_cast<std::int32_t>(component));
            if (fast && i > 0 && weights[order[i - 1]] == weights[component] && limit(order[i - 1]) == limit(component)) {
                ++entries_.back().num_members;
                continue;
            }
            const auto place = static_cast<std::uint32_t>(entries_.size());
            entries_.push_back({0, limit(component), members_.back(), static_cast<std::uint32_t>(i), 1, 0});
            all_.weights[place] = weights[component];
            all_.counts[place] = limit(component) == 0 ? greedy::kSpent : 0.0;
            all_.places[place] = place;
        }
        all_.size = entries_.size();
        all_.pad();
        room_.resize(all_.padded() / 2);
        narrowing_ = fast && all_.size > kFewEnough;
        if (narrowing_) level_ = *std::max_element(weights.begin(), weights.end());
    }

    // All samples of the blend in their order; both spans have room for num_samples.
    template <typename Component>
    void run(std::span<Component> components, std::span<std::int64_t> samples) {
        if (entries_.size() == 1) return deal_in_turn(components, samples);
        const auto size = static_cast<double>(all_.size);
        const std::int64_t steps = narrowing_ ? static_cast<std::int64_t>(4 * std::sqrt(size)) : end_;
        const bool direct = !narrowing_ || all_.size <= kFewToSelect;
        for (next_ = 0; next_ < end_;) {
            stop_ = std::min(end_, next_ + steps);
            if (!direct) select(all_, stop_, middle_);
            const double largest = race(direct ? all_ : middle_, components.data(), samples.data());
            if (next_ < stop_) {
                lower_level();
            } else if (narrowing_) {
                level_ += (largest - level_) / kRise;
                ++held_;
            }
        }
    }

private:
    // Below this the product and the counts are so small that counts that differ have errors that differ.
    static constexpr double kLargestProduct = 1e15;
    static constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();
    static constexpr std::size_t kFewEnough = 32;     // entries that are not worth narrowing
    static constexpr std::size_t kFewToSelect = 192;  // entries out of which the few are taken at once
    static constexpr std::size_t kWanted = 24;        // few as they should be: most steps with least work (measured)
    static constexpr std::int64_t kMostSteps = 64;
    static constexpr double kRise = 16.0;  // a level climbs by this part of the way to the largest error
    static constexpr int kHold = 2;  // batches for which a level should hold
    static constexpr double kLeastGap = 1e-14;

    static void check(std::span<const double> weights, std::span<const std::int64_t> limits, std::int64_t num_samples) {
        if (weights.empty()) throw std::invalid_argument("a blend needs at least one component");
        if (weights.size() > std::numeric_limits<std::int32_t>::max()) throw std::invalid_argument("too many components");
        if (!limits.empty() && limits.size() != weights.size()) throw std::invalid_argument("a limit for each weight");
        for (const double weight : weights) {
            if (!std::isfinite(weight * static_cast<double>(num_samples))) throw std::invalid_argument("a weight is not finite");
        }
        std::int64_t missing = limits.empty() ? 0 : num_samples;
        for (const std::int64_t limit : limits) missing -= std::min(missing, limit);
        if (missing > 0) throw std::invalid_argument("more samples than the limits allow");
    }

    // Whether the rules by which components are ruled out hold: errors grow, and equal weights take turns.
    bool orderly(std::span<const double> weights) const {
        const double last = static_cast<double>(std::max<std::int64_t>(end_, 1));
        return last < kLargestProduct && std::all_of(weights.begin(), weights.end(), [&](double weight) {
            return weight >= 0.0 && weight * last < kLargestProduct;
        });
    }

    // The fill of equal weights and limits.
    template <typename Component>
    void deal_in_turn(std::span<Component> components, std::span<std::int64_t> samples) const {
        std::size_t t = 0;
        for (std::int64_t sample = 0;; ++sample) {
            for (const std::int32_t member : members_) {
                if (t == samples.size()) return;
                components[t] = static_cast<Component>(member);
                samples[t++] = sample;
            }
        }
    }

    // The entries that may win before the sample `stop`.
    void select(const greedy::Field& wide, std::int64_t stop, greedy::Field& small) const {
        (wide_ ? greedy::select_wide : greedy::select_plain)(wide, greedy::target(stop - 1), level_, small);
        small.pad();
    }

    // Samples until stop_, or until all errors are below the level; the largest error that was seen last.
    template <typename Component>
    double race(greedy::Field& middle, Component* components, std::int64_t* samples) {
        for (;;) {
            const std::int64_t steps = std::min(stop_ - next_, narrowing_ ? steps_ : stop_);
            select(middle, next_ + steps, few_);
            choose_steps();
            const greedy::Race race(few_, middle, all_, entries_, members_, room_);
            const greedy::Track<Component> track{next_, static_cast<std::size_t>(steps), level_, components + next_,
                                                 samples + next_};
            const auto [done, largest] = wide_ ? greedy::sprint_wide(race, track) : greedy::sprint_plain(race, track);
            next_ += static_cast<std::int64_t>(done);
            if (done < track.steps || next_ == stop_) return largest;
        }
    }

    // How long the next few shall be enough: the longer, the more of them.
    void choose_steps() {
        if (few_.size > kWanted) {
            steps_ = std::max({steps_ - steps_ / 4, std::int64_t{4}, static_cast<std::int64_t>(few_.size / 4)});
        } else if (few_.size + 4 <= kWanted) {
            steps_ = std::min(steps_ + 1, kMostSteps);
        }
    }

    // All errors are below the level: it goes down, further than last time if that did not hold for long.
    void lower_level() {
        gap_ = std::clamp(gap_ * (held_ < kHold ? 1.25 : 0.8), kLeastGap, 1.0);
        level_ -= gap_;
        held_ = 0;
    }

    bool wide_;
    std::int64_t end_;
    std::int64_t next_ = 0;
    std::int64_t stop_ = 0;
    std::int64_t steps_ = 8;  // for which the few are taken
    bool narrowing_ = false;
    double level_ = std::numeric_limits<double>::lowest();
    double gap_ = 0.1;  // by which it went down last
    int held_ = 0;      // batches since then
    std::vector<std::int32_t> members_;
    std::vector<greedy::Entry> entries_;
    greedy::Field all_, middle_, few_;
    std::vector<double> room_;
};

}  // namespace mdata
