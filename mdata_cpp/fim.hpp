// Fill in the middle (Bavarian et al., "Efficient training of language models to fill in the middle", 2022), by tokens.
//
// A row is split after each end of a document; each part stays unchanged, or is divided at two drawn positions into
// prefix, middle and suffix, which are written in another order after ids that name them. With a split id (between the
// files of a repository, for example) a part is rearranged file by file. The rules are those of Megatron's FIM dataset,
// except for the source of the draws: every row has its own stream. Slow twin: tests/reference/fim.py.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "keyed.hpp"

namespace mdata {

struct FimRule {
    std::int64_t prefix, middle, suffix, eod;
    std::optional<std::int64_t> split;
    std::vector<std::int64_t> untouched;  // a stretch or fragment that begins so is left as it is; empty: none
    double rate, spm_rate, fragment_rate;
};

using Tokens = std::span<const std::int64_t>;

class FimWriter {
public:
    FimWriter(const FimRule& rule, KeyedStream& draws, std::vector<std::int64_t>& out)
        : rule_(rule), draws_(draws), out_(out) {}

    void row(Tokens text) {
        each(text, rule_.eod, [this](Tokens one) { stretch(one); });
    }

private:
    // What stands before each mark, if anything, with the mark behind it; then what stands behind the last, even if empty.
    template <typename Write>
    void each(Tokens text, std::int64_t mark, Write&& write) {
        for (;;) {
            const auto found = std::find(text.begin(), text.end(), mark);
            const auto size = static_cast<std::size_t>(found - text.begin());
            if (found == text.end()) return write(text);
            if (size > 0) {
                write(text.first(size));
                out_.push_back(mark);
            }
            text = text.subspan(size + 1);
        }
    }

    void stretch(Tokens text) {
        if (!rule_.split || std::find(text.begin(), text.end(), *rule_.split) == text.end()) {
            permute(text, rule_.rate);
        } else if (coin(rule_.rate)) {
            each(text, *rule_.split, [this](Tokens one) { permute(one, rule_.fragment_rate); });
        } else {
            add(text);
        }
    }

    void permute(Tokens text, double rate) {
        if (!coin(rate) || is_untouched(text)) return add(text);
        std::size_t first = place(text), second = place(text);
        if (first > second) std::swap(first, second);
        const Tokens prefix = text.first(first), middle = text.subspan(first, second - first), suffix = text.subspan(second);
        out_.push_back(rule_.prefix);
        if (coin(rule_.spm_rate)) {
            out_.push_back(rule_.suffix);
            add(suffix);
            out_.push_back(rule_.middle);
            add(prefix);
        } else {
            add(prefix);
            out_.push_back(rule_.suffix);
            add(suffix);
            out_.push_back(rule_.middle);
        }
        add(middle);
    }

    bool is_untouched(Tokens text) const {
        const auto& begin = rule_.untouched;
        return !begin.empty() && text.size() >= begin.size() && std::equal(begin.begin(), begin.end(), text.begin());
    }

    bool coin(double chance) { return draws_.real() < chance; }

    std::size_t place(Tokens text) { return static_cast<std::size_t>(draws_.up_to(text.size())); }

    void add(Tokens text) { out_.insert(out_.end(), text.begin(), text.end()); }

    const FimRule& rule_;
    KeyedStream& draws_;
    std::vector<std::int64_t>& out_;
};

// Rearrange the first `count` tokens of a row, cut what has no room in its first `limit` places, fill up what is left of
// the row; how many places hold text then. `scratch` is memory to be used again.
inline std::int64_t fim_row(const FimRule& rule, KeyedStream draws, std::span<std::int64_t> row, std::size_t count,
                            std::size_t limit, std::int64_t fill, std::vector<std::int64_t>& scratch) {
    scratch.clear();
    FimWriter(rule, draws, scratch).row(row.first(count));
    const std::size_t kept = std::min(scratch.size(), limit);
    std::copy_n(scratch.begin(), kept, row.begin());
    std::fill(row.begin() + static_cast<std::ptrdiff_t>(kept), row.end(), fill);
    return static_cast<std::int64_t>(kept);
}

}  // namespace mdata
