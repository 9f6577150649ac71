// Loss masks and positions of a row: where loss counts, and positions that restart.
//
// A row holds S + 1 tokens, inputs and labels overlapping, of which the first `count` are real. By position: a label
// after the real tokens has no loss. By value, as in Megatron's GPT dataset if a pad id is given: tokens equal to it
// are padding, and become 0. Rules about the end-of-document id use the inputs before that.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

namespace mdata {

struct RowRules {
    std::optional<std::int64_t> pad;  // by value; none: by place
    std::optional<std::int64_t> eod;
    bool mask_eod = false;         // no loss where the input is the end of a document
    bool restart_at_eod = false;   // positions restart behind one
    bool apart = false;            // no loss where the next token is another document's
};

// One row: text[S + 1]; loss[S] and positions[S] may be empty; cuts: places in (0, S) where positions restart.
struct RowFields {
    std::span<std::int64_t> text;
    std::int64_t count;
    std::span<const std::int32_t> cuts;
    std::span<float> loss;
    std::span<std::int64_t> positions;
};

inline void count_up(std::span<std::int64_t> positions) {
    for (std::size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<std::int64_t>(i);
}

inline void restart(const RowRules& rules, const RowFields& row) {
    std::size_t from = 0;
    for (const std::int32_t cut : row.cuts) {
        // Cuts that are not ascending places of the row are the caller's mistake; none leaves the row.
        const std::size_t to = std::clamp<std::size_t>(static_cast<std::size_t>(std::max(cut, 0)), from, row.positions.size());
        count_up(row.positions.subspan(from, to - from));
        from = to;
    }
    count_up(row.positions.subspan(from));
    if (!rules.restart_at_eod || !rules.eod) return;
    for (std::size_t i = 0, first = 0; i < row.positions.size(); ++i) {
        row.positions[i] = static_cast<std::int64_t>(i - first);
        if (row.text[i] == *rules.eod) first = i + 1;
    }
}

// memcpy takes the widest stores that the processor has, twice what a loop compiled for any x86-64 writes.
inline void fill_ones(std::span<float> loss) {
    static constexpr auto kOnes = [] {
        std::array<float, 1024> ones{};
        ones.fill(1.0F);
        return ones;
    }();
    for (; !loss.empty(); loss = loss.subspan(std::min(loss.size(), kOnes.size()))) {
        std::memcpy(loss.data(), kOnes.data(), std::min(loss.size_bytes(), sizeof kOnes));
    }
}

inline void finish_row(const RowRules& rules, const RowFields& row) {
    const std::size_t inputs = row.text.size() - 1;
    if (!row.positions.empty()) restart(rules, row);
    if (!row.loss.empty()) {
        const auto real = static_cast<std::size_t>(std::clamp<std::int64_t>(row.count - 1, 0, static_cast<std::int64_t>(inputs)));
        fill_ones(row.loss.first(real));
        std::fill(row.loss.begin() + static_cast<std::ptrdiff_t>(real), row.loss.end(), 0.0F);
        for (const std::int32_t cut : rules.apart ? row.cuts : std::span<const std::int32_t>()) {
            if (cut > 0 && static_cast<std::size_t>(cut) <= inputs) row.loss[static_cast<std::size_t>(cut) - 1] = 0.0F;
        }
        if (rules.mask_eod && rules.eod) {
            for (std::size_t i = 0; i < inputs; ++i) row.loss[i] = row.text[i] == *rules.eod ? 0.0F : row.loss[i];
        }
        if (rules.pad) {
            for (std::size_t i = 0; i < inputs; ++i) row.loss[i] = row.text[i + 1] == *rules.pad ? 0.0F : row.loss[i];
        }
    }
    if (rules.pad) {
        for (std::int64_t& token : row.text) token = token == *rules.pad ? 0 : token;
    }
}

// All rows of a buffer: counts[i] tokens of row i are real, row i has the cuts up to ends[i] (ends empty: no cuts).
struct RowArrays {
    std::span<std::int64_t> text;
    std::size_t width;
    std::span<float> loss;
    std::span<std::int64_t> positions;
};

inline void finish_rows(const RowRules& rules, const RowArrays& rows, std::span<const std::int64_t> counts,
                        std::span<const std::int64_t> ends, std::span<const std::int32_t> cuts) {
    const std::size_t inputs = rows.width - 1;
    const auto part = [&](auto span, std::size_t row) { return span.empty() ? span : span.subspan(row * inputs, inputs); };
    std::int64_t before = 0;
    for (std::size_t i = 0; i < counts.size(); ++i) {
        const std::int64_t end = ends.empty() ? 0 : ends[i];
        if (end < before || static_cast<std::uint64_t>(end) > cuts.size()) throw std::invalid_argument("ends of cuts that decrease");
        finish_row(rules, {rows.text.subspan(i * rows.width, rows.width), counts[i],
                           cuts.subspan(static_cast<std::size_t>(before), static_cast<std::size_t>(end - before)),
                           part(rows.loss, i), part(rows.positions, i)});
        before = end;
    }
}

// Rows of S inputs laid end to end, with their cuts, as one list of where documents begin, then the end; and the longest
// document. Row i has the cuts up to ends[i].
struct CumulativeLengths {
    std::vector<std::int32_t> starts;
    std::int32_t longest = 0;
};

inline CumulativeLengths cumulative_lengths(std::span<const std::int64_t> ends, std::span<const std::int32_t> cuts,
                                            std::int64_t inputs) {
    constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
    const auto rows = static_cast<std::int64_t>(ends.size());
    if (inputs < 1 || (rows > 0 && inputs > kMost / rows)) throw std::overflow_error("rows of more than 2^31 - 1 tokens in all");
    CumulativeLengths found;
    found.starts.reserve(cuts.size() + ends.size() + 1);
    std::int64_t last = 0;
    const auto add = [&](std::int64_t start) {
        if (start == last && !found.starts.empty()) return;  // an empty document
        if (start < last || start > rows * inputs) throw std::invalid_argument("cuts that are not ascending places of their row");
        found.longest = std::max(found.longest, static_cast<std::int32_t>(start - last));
        found.starts.push_back(static_cast<std::int32_t>(start));
        last = start;
    };
    std::int64_t cut = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
        add(row * inputs);
        const std::int64_t end = ends[static_cast<std::size_t>(row)];
        if (end < cut || static_cast<std::uint64_t>(end) > cuts.size()) throw std::invalid_argument("ends of cuts that decrease");
        for (; cut < end; ++cut) add(row * inputs + cuts[static_cast<std::size_t>(cut)]);
    }
    add(rows * inputs);
    return found;
}

}  // namespace mdata
