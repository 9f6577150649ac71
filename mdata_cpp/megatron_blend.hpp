// Megatron's greedy fill of a blend: sample t goes to the component whose error w_i m - c_i is largest, m = max(t, 1),
// c_i its samples so far, the lowest number among equals; equal in every bit, so the product is rounded before the
// subtraction (no fused multiply-add: this is compiled with -ffp-contract=off).
//
// The original looks at every component for every sample. Here most are ruled out for many samples at once, exactly:
// an error that is not drawn never falls (weights are not negative, and rounding is monotone). So if K components have
// an error of at least L now, then the largest one is at least L for K samples; a component whose error, undrawn, is
// still below L at the last of them is out of the race. The rest is a smaller race of the same kind. A race of few is
// narrowed at once to those whose counts find room in registers, without counting to K: samples are drawn from them for
// as long as the largest error is not below L. L is guessed from the race before; a bad guess costs time and nothing
// else. Components of equal weight take turns, so that they are one entry here. Slow twin:
// mdata/reference/megatron_blend.py.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <numeric>
#include <span>
#include <stdexcept>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define MDATA_FOR_AVX2 __attribute__((target("avx2")))
#endif

namespace mdata {

namespace greedy {

constexpr std::size_t kPadding = 16;  // races are filled up to a multiple of this by entries that never win
constexpr double kSpent = std::numeric_limits<double>::infinity();
constexpr double kNever = -kSpent;

inline double target(std::int64_t t) { return static_cast<double>(std::max<std::int64_t>(t, 1)); }

// Some entries: components of one weight that take turns. An entry's count goes up when its last one had its turn.
struct Race {
    const double* weights;
    double* counts;        // samples of the entry's next component so far; kSpent when it has no more
    const double* limits;  // where a count becomes kSpent
    std::uint32_t* left;   // components whose turn is still to come
    const std::uint32_t* members;
    std::size_t padded;
    std::uint32_t unusual;  // of a race of few, a bit for each entry whose count may do anything but go up by one
};

// The samples of a sprint, and what it writes: errors of all entries where it stopped; each winner's place.
struct Track {
    std::int64_t first;
    std::size_t steps;
    double level;  // it stops where the largest error is below
    double* errors;
    std::uint32_t* places;

    double target_of(std::size_t step) const { return target(first + static_cast<std::int64_t>(step)); }
};

// How many samples were drawn, and the largest error that was seen last.
struct Sprint {
    std::size_t steps;
    double largest;
};

// After a sample of an entry: what is to be added to its count.
inline double count_up(const Race& race, std::size_t place) {
    if (--race.left[place] > 0) return 0.0;
    race.left[place] = race.members[place];
    return race.counts[place] + 1.0 == race.limits[place] ? kSpent : 1.0;
}

// Four functions for any processor, and the same for one with vectors of four numbers.
struct Vectors {
    // All errors at m into `errors`; the largest one.
    double (*measure)(const Race&, double m, double* errors);
    // How many of the errors reach the level.
    std::size_t (*count)(const double* errors, std::size_t padded, double level);
    // The places whose errors reach the level at m, ascending; `places` has room for all and four more.
    std::size_t (*select)(const Race&, double m, double level, std::uint32_t* places);
    // The next samples, one after another, until two errors are equal or all are below the level.
    Sprint (*sprint)(const Race&, const Track&);
};

inline double measure_plain(const Race& race, double m, double* errors) {
    double largest = kNever;
    for (std::size_t i = 0; i < race.padded; ++i) {
        errors[i] = race.weights[i] * m - race.counts[i];
        largest = std::max(largest, errors[i]);
    }
    return largest;
}

inline std::size_t count_plain(const double* errors, std::size_t padded, double level) {
    return static_cast<std::size_t>(std::count_if(errors, errors + padded, [&](double error) { return error >= level; }));
}

inline std::size_t select_plain(const Race& race, double m, double level, std::uint32_t* places) {
    std::size_t found = 0;
    for (std::size_t i = 0; i < race.padded; ++i) {
        places[found] = static_cast<std::uint32_t>(i);
        found += race.weights[i] * m - race.counts[i] >= level ? 1 : 0;
    }
    return found;
}

inline Sprint sprint_plain(const Race& race, const Track& track) {
    double largest = kNever;
    for (std::size_t step = 0; step < track.steps; ++step) {
        largest = measure_plain(race, track.target_of(step), track.errors);
        if (largest < track.level || count_plain(track.errors, race.padded, largest) != 1) return {step, largest};
        const auto place = static_cast<std::size_t>(std::find(track.errors, track.errors + race.padded, largest) - track.errors);
        track.places[step] = static_cast<std::uint32_t>(place);
        race.counts[place] += count_up(race, place);
    }
    return {track.steps, largest};
}

constexpr Vectors kPlain = {measure_plain, count_plain, select_plain, sprint_plain};

#if defined(__x86_64__)

MDATA_FOR_AVX2 inline __m256d errors_at(const Race& race, std::size_t i, __m256d m) {
    const __m256d product = _mm256_mul_pd(_mm256_loadu_pd(race.weights + i), m);
    return _mm256_sub_pd(product, _mm256_loadu_pd(race.counts + i));
}

// The largest of four numbers, in all lanes.
MDATA_FOR_AVX2 inline __m256d largest_of(__m256d numbers) {
    numbers = _mm256_max_pd(numbers, _mm256_permute2f128_pd(numbers, numbers, 1));
    return _mm256_max_pd(numbers, _mm256_permute_pd(numbers, 5));
}

MDATA_FOR_AVX2 inline __m256d measure_lanes(const Race& race, double m, double* errors) {
    const __m256d ms = _mm256_set1_pd(m);
    __m256d best[4] = {_mm256_set1_pd(kNever), _mm256_set1_pd(kNever), _mm256_set1_pd(kNever), _mm256_set1_pd(kNever)};
    for (std::size_t i = 0; i < race.padded; i += kPadding) {
        for (std::size_t k = 0; k < 4; ++k) {
            const __m256d error = errors_at(race, i + 4 * k, ms);
            _mm256_storeu_pd(errors + i + 4 * k, error);
            best[k] = _mm256_max_pd(best[k], error);
        }
    }
    return largest_of(_mm256_max_pd(_mm256_max_pd(best[0], best[1]), _mm256_max_pd(best[2], best[3])));
}

MDATA_FOR_AVX2 inline double measure_wide(const Race& race, double m, double* errors) {
    return _mm256_cvtsd_f64(measure_lanes(race, m, errors));
}

MDATA_FOR_AVX2 inline std::size_t count_wide(const double* errors, std::size_t padded, double level) {
    const __m256d levels = _mm256_set1_pd(level);
    __m256i count = _mm256_setzero_si256();
    for (std::size_t i = 0; i < padded; i += 4) {
        const __m256d reach = _mm256_cmp_pd(_mm256_loadu_pd(errors + i), levels, _CMP_GE_OQ);
        count = _mm256_sub_epi64(count, _mm256_castpd_si256(reach));
    }
    std::int64_t lanes[4];
    std::memcpy(lanes, &count, sizeof lanes);
    return static_cast<std::size_t>(lanes[0] + lanes[1] + lanes[2] + lanes[3]);
}

// For each set of four lanes the shuffle of 32-bit numbers that moves them to the front.
constexpr auto kFronts = [] {
    std::array<std::array<std::uint8_t, 16>, 16> fronts{};
    for (std::size_t lanes = 0; lanes < 16; ++lanes) {
        std::size_t to = 0;
        for (std::size_t lane = 0; lane < 4; ++lane) {
            for (std::size_t byte = 0; byte < 4 && (lanes >> lane & 1) != 0; ++byte) {
                fronts[lanes][to++] = static_cast<std::uint8_t>(4 * lane + byte);
            }
        }
    }
    return fronts;
}();

MDATA_FOR_AVX2 inline std::size_t select_wide(const Race& race, double m, double level, std::uint32_t* places) {
    const __m256d ms = _mm256_set1_pd(m);
    const __m256d levels = _mm256_set1_pd(level);
    __m128i at = _mm_setr_epi32(0, 1, 2, 3);
    std::size_t found = 0;
    for (std::size_t i = 0; i < race.padded; i += 4, at = _mm_add_epi32(at, _mm_set1_epi32(4))) {
        const __m256d reach = _mm256_cmp_pd(errors_at(race, i, ms), levels, _CMP_GE_OQ);
        const auto lanes = static_cast<unsigned>(_mm256_movemask_pd(reach));
        __m128i front;
        std::memcpy(&front, kFronts[lanes].data(), sizeof front);
        front = _mm_shuffle_epi8(at, front);
        std::memcpy(places + found, &front, sizeof front);
        found += static_cast<std::size_t>(std::popcount(lanes));
    }
    return found;
}

// Where errors equal the largest one. No branch: which lanes these are cannot be foreseen.
struct Hits {
    std::size_t place = 0;
    std::size_t number = 0;

    void add(std::size_t first, unsigned lanes) {
        const std::size_t here = lanes != 0 ? ~std::size_t{0} : 0;
        place |= here & (first + static_cast<std::size_t>(std::countr_zero(lanes | 1U << kPadding)));
        number += static_cast<std::size_t>(std::popcount(lanes));
    }
};

// The counts at all hits went up by one, whole vectors at a time, since a number that is written alone is waited for
// when it is read with its neighbours. Here that is put right where it was too much; false where errors were equal.
inline bool settle(const Race& race, const Hits& hits, double largest, const Track& track, std::size_t step) {
    if (hits.number != 1) {
        for (std::size_t i = 0; i < race.padded; ++i) race.counts[i] -= track.errors[i] == largest ? 1.0 : 0.0;
        return false;
    }
    track.places[step] = static_cast<std::uint32_t>(hits.place);
    if (race.members[hits.place] > 1 || race.counts[hits.place] == race.limits[hits.place]) {
        race.counts[hits.place] -= 1.0;
        race.counts[hits.place] += count_up(race, hits.place);
    }
    return true;
}

MDATA_FOR_AVX2 inline Sprint sprint_many(const Race& race, const Track& track) {
    const __m256d ones = _mm256_set1_pd(1.0);
    double top = kNever;
    for (std::size_t step = 0; step < track.steps; ++step) {
        const __m256d largest = measure_lanes(race, track.target_of(step), track.errors);
        top = _mm256_cvtsd_f64(largest);
        if (top < track.level) return {step, top};
        Hits hits;
        for (std::size_t i = 0; i < race.padded; i += kPadding) {
            unsigned lanes = 0;
            for (std::size_t k = 0; k < 4; ++k) {
                const __m256d equal = _mm256_cmp_pd(_mm256_loadu_pd(track.errors + i + 4 * k), largest, _CMP_EQ_OQ);
                double* counts = race.counts + i + 4 * k;
                _mm256_storeu_pd(counts, _mm256_add_pd(_mm256_loadu_pd(counts), _mm256_and_pd(equal, ones)));
                lanes |= static_cast<unsigned>(_mm256_movemask_pd(equal)) << (4 * k);
            }
            hits.add(i, lanes);
        }
        if (!settle(race, hits, top, track, step)) return {step, top};
    }
    return {track.steps, top};
}

// The same for as many vectors as find room in registers: from one sample to the next no count goes through memory.
template <std::size_t kNumVectors>
MDATA_FOR_AVX2 inline Sprint sprint_few(const Race& race, const Track& track) {
    const __m256d ones = _mm256_set1_pd(1.0);
    __m256d best = _mm256_set1_pd(kNever);
    __m256d counts[kNumVectors];
    __m256d errors[kNumVectors];
    for (std::size_t k = 0; k < kNumVectors; ++k) {
        counts[k] = _mm256_loadu_pd(race.counts + 4 * k);
        errors[k] = best;
    }
    std::size_t step = 0;
    for (; step < track.steps; ++step) {
        const __m256d m = _mm256_set1_pd(track.target_of(step));
        for (std::size_t k = 0; k < kNumVectors; ++k) {
            errors[k] = _mm256_sub_pd(_mm256_mul_pd(_mm256_loadu_pd(race.weights + 4 * k), m), counts[k]);
        }
        __m256d halves[kNumVectors / 2];
        for (std::size_t k = 0; k < kNumVectors / 2; ++k) halves[k] = _mm256_max_pd(errors[2 * k], errors[2 * k + 1]);
        best = halves[0];
        for (std::size_t k = 1; k < kNumVectors / 2; ++k) best = _mm256_max_pd(best, halves[k]);
        best = largest_of(best);
        unsigned lanes = 0;
        for (std::size_t k = 0; k < kNumVectors; ++k) {
            const __m256d equal = _mm256_cmp_pd(errors[k], best, _CMP_EQ_OQ);
            lanes |= static_cast<unsigned>(_mm256_movemask_pd(equal)) << (4 * k);
        }
        if ((lanes & (lanes - 1)) != 0 || _mm256_cvtsd_f64(best) < track.level) break;
        const auto place = static_cast<std::size_t>(std::countr_zero(lanes));
        track.places[step] = static_cast<std::uint32_t>(place);
        if ((lanes & race.unusual) == 0) {
            for (std::size_t k = 0; k < kNumVectors; ++k) {
                const __m256d equal = _mm256_cmp_pd(errors[k], best, _CMP_EQ_OQ);
                counts[k] = _mm256_add_pd(counts[k], _mm256_and_pd(equal, ones));
            }
        } else {
            for (std::size_t k = 0; k < kNumVectors; ++k) _mm256_storeu_pd(race.counts + 4 * k, counts[k]);
            race.counts[place] += count_up(race, place);
            for (std::size_t k = 0; k < kNumVectors; ++k) counts[k] = _mm256_loadu_pd(race.counts + 4 * k);
        }
    }
    for (std::size_t k = 0; k < kNumVectors; ++k) {
        _mm256_storeu_pd(race.counts + 4 * k, counts[k]);
        _mm256_storeu_pd(track.errors + 4 * k, errors[k]);
    }
    return {step, _mm256_cvtsd_f64(best)};
}

MDATA_FOR_AVX2 inline Sprint sprint_wide(const Race& race, const Track& track) {
    if (race.padded == 16) return sprint_few<4>(race, track);
    if (race.padded == 32) return sprint_few<8>(race, track);
    return sprint_many(race, track);
}

constexpr Vectors kWide = {measure_wide, count_wide, select_wide, sprint_wide};
#else
constexpr Vectors kWide = kPlain;
#endif

inline bool has_wide_vectors() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") != 0;
#else
    return false;
#endif
}

}  // namespace greedy

// The fill of one blend. Weights are finite; with `limits`, component i gives at most limits[i] samples.
class GreedyFill {
public:
    GreedyFill(std::span<const double> weights, std::span<const std::int64_t> limits, std::int64_t num_samples,
               bool wide = greedy::has_wide_vectors())
        : vectors_(wide ? greedy::kWide : greedy::kPlain), end_(num_samples) {
        check(weights, limits, num_samples);
        std::vector<std::size_t> order(weights.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        const bool fast = orderly(weights);
        const auto limit = [&](std::size_t i) { return limits.empty() ? end_ : limits[i]; };
        const auto equal = [&](std::size_t a, std::size_t b) {
            return fast && weights[a] == weights[b] && limit(a) == limit(b);
        };
        if (fast) {
            std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
                return weights[a] != weights[b] ? weights[a] < weights[b] : limit(a) < limit(b);
            });
        }
        for (std::size_t i = 0; i < order.size(); ++i) {
            members_.push_back(static_cast<std::int64_t>(order[i]));
            if (i > 0 && equal(order[i - 1], order[i])) {
                ++entries_.back().num_members;
            } else {
                entries_.push_back({i, 1, limit(order[i])});
            }
        }
        Race& all = races_.emplace_back();
        unusual_ = !limits.empty() || entries_.size() < order.size();
        all.resize(entries_.size());
        for (std::size_t i = 0; i < entries_.size(); ++i) {
            const Entry& entry = entries_[i];
            all.weights[i] = weights[order[entry.first_member]];
            all.counts[i] = entry.limit == 0 ? greedy::kSpent : 0.0;
            all.limits[i] = static_cast<double>(entry.limit);
            all.left[i] = all.members[i] = entry.num_members;
        }
        narrowing_ = fast;
    }

    // All samples of the blend in their order; both spans have room for num_samples.
    template <typename Component>
    void run(std::span<Component> components, std::span<std::int64_t> samples) {
        next_ = 0;
        const auto out = [&](std::int64_t t, std::int64_t component, std::int64_t sample) {
            components[static_cast<std::size_t>(t)] = static_cast<Component>(component);
            samples[static_cast<std::size_t>(t)] = sample;
        };
        if (entries_.size() > 1) return race(0, end_, out);
        while (next_ < end_) write(races_[0], 0, out);  // all take turns
    }

private:
    // Below this the product and the counts are so small that counts that differ have errors that differ.
    static constexpr double kLargestProduct = 1e15;
    static constexpr std::size_t kFewest = 32;  // entries whose counts find room in registers
    static constexpr std::size_t kFew = 256;    // entries that are narrowed down to the fewest at once (measured)
    static constexpr std::int64_t kSprint = 256;
    static constexpr double kLeastGap = 1e-14;
    static constexpr std::size_t kRounds = 8;  // a race of n entries is narrowed for about n / kRounds samples

    struct Entry {
        std::size_t first_member;
        std::uint32_t num_members;
        std::int64_t limit;
        std::uint32_t turn = 0;   // whose it is
        std::int64_t count = 0;   // samples of each member so far, one more for those before the turn
    };

    // Entries that may win; `wider` is their place in the race `from` which they were taken.
    struct Race {
        std::vector<double> weights;
        std::vector<double> counts;
        std::vector<double> limits;
        std::vector<std::uint32_t> left;
        std::vector<std::uint32_t> members;
        std::vector<std::uint32_t> wider;
        std::vector<double> errors;
        Race* from = nullptr;
        std::size_t size = 0;
        double gap = 0.1;        // from the largest error down to the level chosen last
        std::int64_t reach = 8;  // samples for which it was narrowed to the fewest last
        std::uint32_t unusual = 0;

        void resize(std::size_t num_entries) {
            size = num_entries;
            const std::size_t padded = (size + greedy::kPadding - 1) / greedy::kPadding * greedy::kPadding;
            for (std::vector<double>* values : {&weights, &counts, &errors}) values->resize(padded);
            for (std::vector<std::uint32_t>* values : {&left, &members}) values->resize(padded, 1);
            limits.resize(padded, greedy::kSpent);
            std::fill(weights.begin() + static_cast<std::ptrdiff_t>(size), weights.end(), 0.0);
            std::fill(counts.begin() + static_cast<std::ptrdiff_t>(size), counts.end(), greedy::kSpent);
        }

        greedy::Race view() {
            return {weights.data(), counts.data(), limits.data(), left.data(), members.data(),
                    weights.size(), unusual};
        }

        // Of few entries those whose counts may do anything but go up by one during some samples.
        void find_unusual(std::size_t steps) {
            unusual = 0;
            for (std::size_t i = 0; i < size && size <= kFewest; ++i) {
                const bool is = members[i] > 1 || counts[i] + static_cast<double>(steps) >= limits[i];
                unusual |= static_cast<std::uint32_t>(is) << i;
            }
        }
    };

    static void check(std::span<const double> weights, std::span<const std::int64_t> limits, std::int64_t num_samples) {
        if (weights.empty()) throw std::invalid_argument("a blend needs at least one component");
        if (weights.size() > std::numeric_limits<std::int32_t>::max()) throw std::invalid_argument("too many components");
        if (!limits.empty() && limits.size() != weights.size()) throw std::invalid_argument("a limit for each weight");
        for (const double weight : weights) {
            if (!std::isfinite(weight * static_cast<double>(num_samples))) throw std::invalid_argument("a weight is not finite");
        }
    }

    // Whether the rules by which components are ruled out hold: errors grow, and equal weights take turns.
    bool orderly(std::span<const double> weights) const {
        const double last = static_cast<double>(std::max<std::int64_t>(end_, 1));
        return last < kLargestProduct && std::all_of(weights.begin(), weights.end(), [&](double weight) {
            return weight >= 0.0 && weight * last < kLargestProduct;
        });
    }

    template <typename Out>
    void race(std::size_t depth, std::int64_t steps, const Out& out) {
        if (!narrowing_ || races_[depth].size <= kFewest) {
            return one_by_one(depth, steps, out, greedy::kNever);
        }
        if (races_[depth].size <= kFew) return dash(depth, steps, out);
        if (races_.size() == depth + 1) races_.emplace_back();
        for (const std::int64_t stop = next_ + steps; next_ < stop;) {
            const Level level = choose_level(races_[depth]);
            const std::int64_t some = std::min(stop - next_, static_cast<std::int64_t>(level.reached));
            if (narrow(depth, level.value, greedy::target(next_ + some - 1), races_[depth].size / 4 * 3)) {
                race(depth + 1, some, out);
            } else {
                one_by_one(depth, some, out, greedy::kNever);
            }
        }
    }

    struct Level {
        double value;
        std::size_t reached;  // how many errors reach it now, at least one
    };

    // A level that about size / kRounds errors reach.
    Level choose_level(Race& race) {
        const std::size_t wanted = std::max<std::size_t>(4, race.size / kRounds);
        const double largest = vectors_.measure(race.view(), greedy::target(next_), race.errors.data());
        std::size_t reached = 0;
        double value = largest;
        for (int tries = 0; tries < 4; ++tries) {
            value = largest - race.gap;
            reached = vectors_.count(race.errors.data(), race.errors.size(), value);
            const double ratio = static_cast<double>(wanted) / static_cast<double>(reached);
            race.gap = std::clamp(race.gap * std::clamp(ratio, 0.25, 4.0), kLeastGap, 1.0);
            if (reached >= wanted / 2 && reached <= 2 * wanted) break;
        }
        return {value, reached};
    }

    // The entries that can win up to the last sample's target become the race below, if they are not too many.
    bool narrow(std::size_t depth, double level, double last, std::size_t most) {
        Race& wide = races_[depth];
        Race& small = races_[depth + 1];
        small.wider.resize(wide.weights.size() + 4);
        const std::size_t found = vectors_.select(wide.view(), last, level, small.wider.data());
        if (found > most) return false;
        small.resize(found);
        small.from = &wide;
        for (std::size_t i = 0; i < found; ++i) {
            const std::uint32_t place = small.wider[i];
            small.weights[i] = wide.weights[place];
            small.counts[i] = wide.counts[place];
        }
        for (std::size_t i = 0; i < found && unusual_; ++i) {
            const std::uint32_t place = small.wider[i];
            small.limits[i] = wide.limits[place];
            small.left[i] = wide.left[place];
            small.members[i] = wide.members[place];
        }
        return true;
    }

    // Samples of a race of few: again and again the fewest that reach a level soon, for as long as one is above it now.
    template <typename Out>
    void dash(std::size_t depth, std::int64_t steps, const Out& out) {
        if (races_.size() == depth + 1) races_.emplace_back();
        Race& wide = races_[depth];
        for (const std::int64_t stop = next_ + steps; next_ < stop;) {
            const double largest = vectors_.measure(wide.view(), greedy::target(next_), wide.errors.data());
            const double level = largest - wide.gap;
            const std::int64_t some = std::min(stop - next_, wide.reach);
            if (narrow(depth, level, greedy::target(next_ + some - 1), kFewest)) {
                const std::int64_t end = next_ + some;
                one_by_one(depth + 1, some, out, level);
                const bool enough = next_ == end;
                wide.gap = std::min(1.0, wide.gap * (enough ? 0.9 : 1.25));
                wide.reach += enough && races_[depth + 1].size + 4 < kFewest ? 1 : 0;
            } else if (wide.gap > kLeastGap) {
                wide.gap *= 0.75;
                wide.reach -= wide.reach / 4;
            } else {
                one_by_one(depth, std::min(stop - next_, kSprint), out, greedy::kNever);
                wide.gap = 16 * kLeastGap;
            }
        }
    }

    // At most so many samples, one after another, until all errors are below the level.
    template <typename Out>
    void one_by_one(std::size_t depth, std::int64_t steps, const Out& out, double level) {
        Race& race = races_[depth];
        for (const std::int64_t stop = next_ + steps; next_ < stop;) {
            const auto some = static_cast<std::size_t>(std::min<std::int64_t>(stop - next_, kSprint));
            if (unusual_) race.find_unusual(some);
            const auto [done, largest] = vectors_.sprint(race.view(), {next_, some, level, race.errors.data(), winners_.data()});
            for (std::size_t i = 0; i < done; ++i) write(race, winners_[i], out);
            if (done == some) continue;
            if (largest < level) return;
            const std::size_t place = lowest(depth);
            race.counts[place] += greedy::count_up(race.view(), place);
            write(race, place, out);
        }
    }

    // One sample of an entry whose own race has counted it.
    template <typename Out>
    void write(const Race& own, std::size_t place, const Out& out) {
        for (const Race* race = &own; race->from != nullptr; race = race->from) {
            const std::size_t wider = race->wider[place];
            race->from->counts[wider] = race->counts[place];
            if (unusual_) race->from->left[wider] = race->left[place];
            place = wider;
        }
        Entry& entry = entries_[place];
        out(next_++, members_[entry.first_member + entry.turn], entry.count);
        if (++entry.turn == entry.num_members) {
            entry.turn = 0;
            ++entry.count;
        }
    }

    std::int64_t component_of(std::size_t depth, std::size_t place) const {
        for (; depth > 0; --depth) place = races_[depth].wider[place];
        return members_[entries_[place].first_member + entries_[place].turn];
    }

    // Of the largest errors that of the lowest component.
    std::size_t lowest(std::size_t depth) const {
        const Race& race = races_[depth];
        const double largest = *std::max_element(race.errors.begin(), race.errors.end());
        std::size_t best = 0;
        std::int64_t component = std::numeric_limits<std::int64_t>::max();
        for (std::size_t i = 0; i < race.size; ++i) {
            if (race.errors[i] != largest) continue;
            const std::int64_t other = component_of(depth, i);
            if (other < component) {
                best = i;
                component = other;
            }
        }
        return best;
    }

    greedy::Vectors vectors_;
    std::int64_t end_;
    std::int64_t next_ = 0;
    bool narrowing_ = false;
    bool unusual_ = false;  // whether a count may do anything but go up by one
    std::vector<std::int64_t> members_;
    std::vector<Entry> entries_;
    std::deque<Race> races_;
    std::vector<std::uint32_t> winners_ = std::vector<std::uint32_t>(kSprint);
};

}  // namespace mdata
