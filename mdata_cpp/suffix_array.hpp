// Repeated substrings of texts, from a suffix array built by induced sorting (Nong, Zhang and Chan, 2009).
//
// 4 bytes for each byte of text, and as much again at most while it is built and used; texts of less than 2^31 bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

namespace mdata::suffixes {

using Index = std::int32_t;
// Text is fetched for the suffix that comes so many later: each lies somewhere else.
constexpr std::size_t kAhead = 32;

// Fills `suffixes` with the positions of `text`, whose symbols are below `alphabet`, in the order of what begins there.
template <typename Symbol>
void induced_sort(std::span<const Symbol> text, std::size_t alphabet, std::span<Index> suffixes) {
    const auto size = static_cast<Index>(text.size());
    if (size == 0) return;
    if (size == 1) {
        suffixes[0] = 0;
        return;
    }
    const auto at = [&](Index position) { return static_cast<std::size_t>(text[static_cast<std::size_t>(position)]); };
    const auto place = [&](std::size_t number) -> Index& { return suffixes[number]; };
    const auto fetch = [&](Index position) {
        if (position >= 0) __builtin_prefetch(&text[static_cast<std::size_t>(position)]);
    };
    // Whether a suffix is smaller than the one that begins after it; the end of the text is smaller than all.
    std::vector<bool> is_small(text.size());
    for (Index position = size - 2; position >= 0; --position) {
        const std::size_t here = at(position), next = at(position + 1);
        is_small[static_cast<std::size_t>(position)] =
            here < next || (here == next && is_small[static_cast<std::size_t>(position) + 1]);
    }
    const auto is_leftmost = [&](Index position) {
        const auto here = static_cast<std::size_t>(position);
        return position > 0 && is_small[here] && !is_small[here - 1];
    };
    std::vector<Index> counts(alphabet + 1);
    for (const Symbol symbol : text) ++counts[static_cast<std::size_t>(symbol) + 1];
    for (std::size_t symbol = 0; symbol < alphabet; ++symbol) counts[symbol + 1] += counts[symbol];
    // From the sorted leftmost small suffixes to all: first the large ones, left to right, then the small ones.
    std::vector<Index> heads, tails;
    const auto induce = [&](std::span<const Index> leftmost) {
        std::fill(suffixes.begin(), suffixes.end(), -1);
        tails.assign(counts.begin() + 1, counts.end());
        for (std::size_t number = leftmost.size(); number-- > 0;)
            place(static_cast<std::size_t>(--tails[at(leftmost[number])])) = leftmost[number];
        heads.assign(counts.begin(), counts.end() - 1);
        place(static_cast<std::size_t>(heads[at(size - 1)]++)) = size - 1;
        // Symbols tell whether a suffix is large or small, so that nothing else is read at places without order.
        for (std::size_t number = 0; number < suffixes.size(); ++number) {
            if (number + kAhead < suffixes.size()) fetch(place(number + kAhead) - 1);
            const Index before = place(number) - 1;
            if (before >= 0 && at(before) >= at(before + 1))
                place(static_cast<std::size_t>(heads[at(before)]++)) = before;
        }
        tails.assign(counts.begin() + 1, counts.end());
        for (std::size_t number = suffixes.size(); number-- > 0;) {
            if (number >= kAhead) fetch(place(number - kAhead) - 1);
            const Index before = place(number) - 1;
            if (before < 0) continue;
            const std::size_t here = at(before), next = at(before + 1);
            // Small suffixes of a symbol are behind its large ones, and fill its range from the end.
            if (here < next || (here == next && static_cast<Index>(number) >= tails[next]))
                place(static_cast<std::size_t>(--tails[here])) = before;
        }
    };
    std::vector<Index> leftmost;
    for (Index position = 1; position < size; ++position)
        if (is_leftmost(position)) leftmost.push_back(position);
    induce(leftmost);
    if (leftmost.size() < 2) return;
    // Each substring from one leftmost small suffix to the next gets a number, in their order.
    std::vector<Index> sorted;
    sorted.reserve(leftmost.size());
    for (std::size_t symbol = 0; symbol < alphabet; ++symbol) {
        const auto end = static_cast<std::size_t>(counts[symbol + 1]);
        for (auto number = static_cast<std::size_t>(tails[symbol]); number < end; ++number) {
            if (number + kAhead < suffixes.size()) fetch(place(number + kAhead) - 1);
            const Index position = place(number);
            if (position > 0 && at(position - 1) > symbol) sorted.push_back(position);
        }
    }
    std::vector<Index> number_of(text.size() / 2 + 1, -1);  // of the substring that begins at twice this, or one more
    const auto end_of = [&](Index position) {
        for (++position; position < size; ++position)
            if (is_leftmost(position)) return position + 1;
        return size;
    };
    Index number = 0, other_end = end_of(sorted[0]);
    for (std::size_t each = 0; each < sorted.size(); ++each) {
        if (each + kAhead < sorted.size()) fetch(sorted[each + kAhead]);
        if (each > 0) {
            const Index one = sorted[each - 1], other = sorted[each], one_end = other_end;
            other_end = end_of(other);
            const bool are_equal =
                one_end != size && other_end != size && one_end - one == other_end - other &&  // the end is unique
                std::equal(text.begin() + one, text.begin() + one_end, text.begin() + other);
            number += are_equal ? 0 : 1;
        }
        number_of[static_cast<std::size_t>(sorted[each] / 2)] = number;
    }
    std::vector<Index> names, order(leftmost.size());
    names.reserve(leftmost.size());
    for (const Index position : leftmost) names.push_back(number_of[static_cast<std::size_t>(position / 2)]);
    number_of = {}, sorted = {};
    induced_sort<Index>(names, static_cast<std::size_t>(number) + 1, order);
    std::vector<Index> in_order(leftmost.size());
    for (std::size_t each = 0; each < order.size(); ++each)
        in_order[each] = leftmost[static_cast<std::size_t>(order[each])];
    induce(in_order);
}

// The suffix array of a text of less than 2^31 bytes.
inline std::vector<Index> suffix_array(std::span<const std::uint8_t> text) {
    if (text.size() >= static_cast<std::size_t>(std::numeric_limits<Index>::max()))
        throw std::length_error("a suffix array holds less than 2^31 bytes");
    std::vector<Index> suffixes(text.size());
    induced_sort<std::uint8_t>(text, 256, suffixes);
    return suffixes;
}

// Whether the suffix at a position begins with the same `length` bytes as the one before it in order. What a suffix has in
// common with that is at most one byte less for the next position (Karkkainen, Manzini and Puglisi, 2009), so no byte is
// compared again and again where a text is periodic.
inline std::vector<bool> equal_to_last(std::span<const std::uint8_t> text, std::span<const Index> suffixes,
                                       std::size_t length) {
    std::vector<Index> last(text.size(), -1);  // the suffix before that at a position
    for (std::size_t number = 1; number < suffixes.size(); ++number)
        last[static_cast<std::size_t>(suffixes[number])] = suffixes[number - 1];
    std::vector<bool> equal(text.size());
    std::size_t common = 0;
    for (std::size_t position = 0; position < text.size(); ++position) {
        if (position + kAhead < text.size() && last[position + kAhead] >= 0)
            __builtin_prefetch(&text[static_cast<std::size_t>(last[position + kAhead])]);
        if (last[position] < 0) {
            common = 0;
            continue;
        }
        const auto other = static_cast<std::size_t>(last[position]);
        const std::size_t most = std::min(length, text.size() - std::max(position, other));
        while (common < most && text[position + common] == text[other + common]) ++common;
        equal[position] = common == length;
        common -= common > 0;
    }
    return equal;
}

// The bytes that repeat earlier ones: ranges [begin, end) of `text`, rising and apart. Of substrings of `length` bytes that
// are equal, all bytes are in one but those of the earliest, which a later one may overlap. Substrings lie inside one of
// the documents that end at `ends`.
inline std::vector<std::int64_t> repeated_ranges(std::span<const std::uint8_t> text, std::span<const std::int64_t> ends,
                                                 std::size_t length) {
    if (length == 0) throw std::invalid_argument("a substring has at least one byte");
    if (!ends.empty() && (!std::is_sorted(ends.begin(), ends.end()) || ends.front() < 0 ||
                          static_cast<std::size_t>(ends.back()) > text.size()))
        throw std::invalid_argument("documents end one after the other, inside the text");
    if (length > text.size()) return {};
    const std::vector<Index> suffixes = suffix_array(text);
    const std::vector<bool> is_equal = equal_to_last(text, suffixes, length);
    std::vector<bool> repeats(text.size());  // whether a whole substring begins there that repeats an earlier one
    std::vector<bool> is_inside(text.size());
    std::int64_t begin = 0;
    for (const std::int64_t end : ends) {
        for (std::int64_t at = begin; at + static_cast<std::int64_t>(length) <= end; ++at)
            is_inside[static_cast<std::size_t>(at)] = true;
        begin = end;
    }
    const auto size = static_cast<Index>(length);
    std::vector<std::pair<Index, Index>> rests;  // [begin, end) of what equal substrings leave of the earliest they overlap
    for (std::size_t begin_at = 0, end_at = 0; begin_at < suffixes.size(); begin_at = end_at) {
        // Equal substrings are neighbours; those that reach into the next document may lie between them.
        Index first = -1, last_overlap = -1;
        for (end_at = begin_at; end_at < suffixes.size(); ++end_at) {
            const Index position = suffixes[end_at];
            if (end_at > begin_at && !is_equal[static_cast<std::size_t>(position)]) break;
            if (is_inside[static_cast<std::size_t>(position)]) first = first < 0 ? position : std::min(first, position);
        }
        for (std::size_t number = begin_at; number < end_at; ++number) {
            const Index position = suffixes[number];
            if (!is_inside[static_cast<std::size_t>(position)] || position == first) continue;
            if (position - first >= size) repeats[static_cast<std::size_t>(position)] = true;
            else last_overlap = std::max(last_overlap, position);
        }
        if (last_overlap >= 0) rests.emplace_back(first + size, last_overlap + size);
    }
    std::sort(rests.begin(), rests.end());
    std::vector<std::int64_t> ranges;
    const auto add = [&](std::int64_t from, std::int64_t to) {
        if (!ranges.empty() && from <= ranges.back()) ranges.back() = std::max(ranges.back(), to);
        else ranges.push_back(from), ranges.push_back(to);
    };
    auto rest = rests.begin();
    for (std::size_t at = 0; at < text.size(); ++at) {
        const auto from = static_cast<std::int64_t>(at);
        if (repeats[at]) add(from, from + static_cast<std::int64_t>(length));
        for (; rest != rests.end() && rest->first == from; ++rest) add(from, rest->second);
    }
    return ranges;
}

}  // namespace mdata::suffixes
