// Which sentences make a sample of BERT or T5: rows of first sentence, one past the last, and a target length.
//
// A document is processed sentence by sentence; a row ends where its target is reached, unless only one sentence would
// be left, which joins it. Some targets are short ones, drawn at random. Documents with too few sentences are skipped,
// and so are those of two or more sentences with one longer than 512 tokens (a document of one sentence is never
// checked for that). In Megatron's form (helpers.cpp: build_mapping) one generator runs through all epochs and the rows
// are shuffled at the end. In the keyed form each document has its own stream of targets, so that any run of documents
// can be mapped separately.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "keyed.hpp"
#include "mersenne.hpp"

namespace mdata {

inline constexpr std::int32_t kLongestSentence = 512;

// `longest` is the usual target, 2 or more; one in `short_ratio` is drawn from [2, longest] (0: none).
struct MappingRule {
    std::int64_t longest;
    std::uint64_t short_ratio;
    std::int64_t least_sentences;
};

template <typename T>
struct MappingRow {
    T first;
    T stop;
    T target;
    bool operator==(const MappingRow&) const = default;
};

template <typename Generator>
std::int64_t draw_target(const MappingRule& rule, Generator& generator) {
    if (rule.short_ratio == 0) return rule.longest;
    const std::uint64_t word = generator.next();
    if (word % rule.short_ratio != 0) return rule.longest;
    return 2 + static_cast<std::int64_t>(word % static_cast<std::uint64_t>(rule.longest - 1));
}

inline bool is_usable(const MappingRule& rule, std::span<const std::int32_t> sizes) {
    if (static_cast<std::int64_t>(sizes.size()) < rule.least_sentences || sizes.empty()) return false;
    bool has_long = false;  // without an early end, so that it becomes vector code
    for (const std::int32_t size : sizes) has_long |= size > kLongestSentence;
    return sizes.size() == 1 || !has_long;
}

// The rows of one document, whose first sentence has the number `first`.
template <typename T, typename Generator>
void map_document(const MappingRule& rule, std::span<const std::int32_t> sizes, std::size_t first, Generator& generator,
                  std::vector<MappingRow<T>>& rows) {
    std::int64_t target = draw_target(rule, generator);
    std::int64_t length = 0;
    std::size_t begin = 0;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
        length += sizes[i];
        const std::size_t rest = sizes.size() - 1 - i;
        const bool full = length >= target && rest > 1 && static_cast<std::int64_t>(i + 1 - begin) >= rule.least_sentences;
        if (!full && rest != 0) continue;
        rows.push_back({static_cast<T>(first + begin), static_cast<T>(first + i + 1), static_cast<T>(target)});
        begin = i + 1;
        length = 0;
        target = draw_target(rule, generator);  // after the last row too: the generator goes on to the next document
    }
}

// One pass over the documents. `generator_of(d)` gives the generator of document d of this span.
template <typename T, typename GeneratorOf>
void map_documents(const MappingRule& rule, std::span<const std::int64_t> boundaries, std::span<const std::int32_t> sizes,
                   GeneratorOf&& generator_of, std::vector<MappingRow<T>>& rows) {
    for (std::size_t d = 0; d + 1 < boundaries.size(); ++d) {
        const std::int64_t first = boundaries[d];
        const std::int64_t stop = boundaries[d + 1];
        if (first < 0 || stop < first || static_cast<std::uint64_t>(stop) > sizes.size()) {
            throw std::out_of_range("a document that is no run of the sentences");
        }
        const auto inside = sizes.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(stop - first));
        if (is_usable(rule, inside)) map_document(rule, inside, static_cast<std::size_t>(first), generator_of(d), rows);
    }
}

// std::shuffle's elder form with a 64-bit word for each row: swap i with word mod (i + 1), from the end. Words are drawn
// a block ahead, so that the rows they name are on their way.
template <typename T>
void shuffle_rows(std::span<MappingRow<T>> rows, std::uint64_t seed) {
    std::mt19937_64 generator(seed);
    constexpr std::size_t ahead = 64;
    std::array<std::size_t, ahead> places;
    for (std::size_t i = rows.size() < 2 ? 0 : rows.size() - 1; i > 0;) {
        const std::size_t count = std::min(ahead, i);
        for (std::size_t k = 0; k < count; ++k) {
            places[k] = static_cast<std::size_t>(generator() % (i - k + 1));
            __builtin_prefetch(&rows[places[k]], 1);
        }
        for (std::size_t k = 0; k < count; ++k) std::swap(rows[i - k], rows[places[k]]);
        i -= count;
    }
}

// Megatron's mapping: whole epochs until there are `limit` rows, at most `epochs`, then shuffled. An epoch without a row
// ends it, for no later one would have any.
template <typename T>
std::vector<MappingRow<T>> megatron_mapping(const MappingRule& rule, std::span<const std::int64_t> boundaries,
                                            std::span<const std::int32_t> sizes, std::uint64_t epochs,
                                            std::uint64_t limit, std::uint32_t seed) {
    std::vector<MappingRow<T>> rows;
    Mersenne generator(seed);
    std::size_t before = 0;
    for (std::uint64_t epoch = 0; epoch < epochs && rows.size() < limit; ++epoch) {
        map_documents(rule, boundaries, sizes, [&](std::size_t) -> Mersenne& { return generator; }, rows);
        if (rows.size() == before) break;
        before = rows.size();
    }
    shuffle_rows(std::span(rows), std::uint64_t{seed} + 1);
    return rows;
}

// The rows of documents from the number `first_document` on, in the order of the file.
template <typename T>
std::vector<MappingRow<T>> keyed_mapping(const MappingRule& rule, std::span<const std::int64_t> boundaries,
                                         std::span<const std::int32_t> sizes, Key128 key, std::uint64_t first_document) {
    std::vector<MappingRow<T>> rows;
    KeyedStream stream(key, 0);
    const auto stream_of = [&](std::size_t d) -> KeyedStream& { return stream = KeyedStream(key, first_document + d); };
    map_documents(rule, boundaries, sizes, stream_of, rows);
    return rows;
}

}  // namespace mdata
