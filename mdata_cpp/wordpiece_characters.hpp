// The result of BERT's normalizer and pre-tokenizer for each code point, as one table for a given treatment.
//
// The parts of the normalizer run in the library's order: clean, spaces around CJK, decompose and drop marks, lower
// case, each on single code points. Only decomposition depends on neighbours: it orders marks by their combining class.
// Almost all marks are dropped right after that, so the order matters only for the few that stay; those have a separate
// action (marks), at which the caller collects the run. Code points with action `left` are for the exact library.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <span>
#include <vector>

#include "wordpiece_tables.hpp"

namespace mdata::wordpiece {

inline constexpr std::uint32_t kCodePoints = 0x110000;

struct Treatment {
    bool clean, cjk, strip, lower;
};

enum class Action : std::uint8_t { keep, drop, blank, alone, swap, list, hangul, marks, left };

// What a code point that came out of the normalizer is to the pre-tokenizer.
enum class Kind : std::uint8_t { word, blank, alone };

struct Element {
    std::uint32_t code;
    Kind kind;
};

// A code point of a decomposition and its combining class.
struct Part {
    std::uint32_t code, combining;
};

template <typename Row, std::size_t N>
const Row* row_of(const Row (&rows)[N], std::uint32_t code) {
    const Row* found = std::upper_bound(std::begin(rows), std::end(rows), code,
                                        [](std::uint32_t wanted, const Row& row) { return wanted < row.first; });
    return found != std::begin(rows) && code <= found[-1].last ? found - 1 : nullptr;
}

inline std::uint32_t combining_of(std::uint32_t code) {
    const Combining* row = row_of(kCombining, code);
    return row ? row->value : 0;
}

class Characters {
public:
    static constexpr std::uint32_t kActionBits = 4;

    explicit Characters(Treatment treatment) : treatment_(treatment), flags_(kCodePoints), blocks_(kCodePoints >> 8) {
        set_flags();
        index_decompositions();
        std::vector<std::uint32_t> block(256);
        std::vector<std::vector<std::uint32_t>> known;
        for (std::uint32_t page = 0; page < blocks_.size(); ++page) {
            for (std::uint32_t low = 0; low < 256; ++low) block[low] = entry_for(page << 8 | low);
            const auto same = std::find(known.begin(), known.end(), block);
            blocks_[page] = static_cast<std::uint16_t>(same - known.begin());
            if (same == known.end()) {
                known.push_back(block);
                entries_.insert(entries_.end(), block.begin(), block.end());
            }
        }
    }

    // An action in the low kActionBits bits; above them the code point of a swap or the place of a list.
    std::uint32_t entry(std::uint32_t code) const {
        return entries_[std::size_t{blocks_[code >> 8]} << 8 | (code & 0xFF)];
    }
    static Action action(std::uint32_t entry) { return static_cast<Action>(entry & ((1U << kActionBits) - 1)); }
    static std::uint32_t payload(std::uint32_t entry) { return entry >> kActionBits; }

    std::span<const Element> list(std::uint32_t place) const {
        return {lists_.data() + place + 1, lists_[place].code};
    }

    bool is_dropped_first(std::uint32_t code) const { return treatment_.clean && has(code, kDroppedFlag); }
    bool is_accent(std::uint32_t code) const { return has(code, kMarkFlag); }

    // The canonical decomposition in full, each part with its combining class; appended.
    void decompose(std::uint32_t code, std::vector<Part>& parts) const {
        const auto found = std::lower_bound(decomposed_.begin(), decomposed_.end(), code,
                                            [](std::uint32_t place, std::uint32_t wanted) {
                                                return kDecomposed[place] < wanted;
                                            });
        if (found == decomposed_.end() || kDecomposed[*found] != code) {
            parts.push_back({code, combining_of(code)});
            return;
        }
        for (std::uint32_t part : std::span(kDecomposed + *found + 2, kDecomposed[*found + 1]))
            parts.push_back({part, combining_of(part)});
    }

    // The elements of a code point after decomposition: lower case if that is asked for; appended.
    void finish(std::uint32_t code, std::vector<Element>& elements) const {
        if (treatment_.lower) {
            if (code == kLowerLong[0]) {
                for (std::uint32_t part : std::span(kLowerLong + 2, kLowerLong[1])) elements.push_back(element(part));
                return;
            }
            const Lowering* row = row_of(kLower, code);
            if (row && (code - row->first) % row->step == 0) code = row->lower + (code - row->first);
        }
        elements.push_back(element(code));
    }

private:
    enum : std::uint8_t {
        kDroppedFlag = 1, kBlankFlag = 2, kCjkFlag = 4, kMarkFlag = 8, kAloneFlag = 16, kSpaceFlag = 32,
        kUnsettledFlag = 64, kChangesFlag = 128,
    };

    bool has(std::uint32_t code, std::uint8_t flag) const { return (flags_[code] & flag) != 0; }

    template <typename Rows>
    void set(const Rows& rows, std::uint8_t flag) {
        for (const auto& row : rows)
            for (std::uint32_t code = row.first; code <= row.last; ++code)
                flags_[code] = static_cast<std::uint8_t>(flags_[code] | flag);
    }

    void set_flags() {
        static_assert(std::size(kLowerLong) == 2 + kLowerLong[1], "one code point has a lower case of several");
        set(kDropped, kDroppedFlag);
        set(kBlank, kBlankFlag);
        set(kCjk, kCjkFlag);
        set(kMark, kMarkFlag);
        set(kPunctuation, kAloneFlag);
        set(kSpace, kSpaceFlag);
        set(kUnsettled, kUnsettledFlag);
        if (treatment_.strip) set(kCombining, kChangesFlag);
        if (treatment_.lower) set(kLower, kChangesFlag);
        if (treatment_.lower) set(std::vector<Range>{{kLowerLong[0], kLowerLong[0]}}, kChangesFlag);
    }

    void index_decompositions() {
        if (!treatment_.strip) return;
        for (std::uint32_t place = 0; place < std::size(kDecomposed); place += 2 + kDecomposed[place + 1]) {
            decomposed_.push_back(place);
            flags_[kDecomposed[place]] |= kChangesFlag;
        }
    }

    Element element(std::uint32_t code) const {
        return {code, has(code, kSpaceFlag) ? Kind::blank : has(code, kAloneFlag) ? Kind::alone : Kind::word};
    }

    static std::uint32_t entry_of(Action action, std::uint32_t payload = 0) {
        return payload << kActionBits | static_cast<std::uint32_t>(action);
    }

    std::uint32_t entry_for(std::uint32_t code) {
        if (treatment_.clean && has(code, kDroppedFlag)) return entry_of(Action::drop);
        if (treatment_.clean && has(code, kBlankFlag)) return entry_of(Action::blank);
        if ((treatment_.strip || treatment_.lower) && has(code, kUnsettledFlag)) return entry_of(Action::left);
        if (treatment_.strip && code >= 0xAC00 && code <= 0xD7A3) return entry_of(Action::hangul);
        const bool apart = treatment_.cjk && has(code, kCjkFlag);
        if (has(code, kChangesFlag)) return changed(code, apart);
        if (treatment_.strip && has(code, kMarkFlag)) return entry_of(Action::drop);
        const Kind kind = apart ? Kind::alone : element(code).kind;
        return entry_of(kind == Kind::blank ? Action::blank : kind == Kind::alone ? Action::alone : Action::keep);
    }

    // For code points that become others, or none.
    std::uint32_t changed(std::uint32_t code, bool apart) {
        std::vector<Part> parts;
        decompose(code, parts);
        std::vector<Element> elements;
        for (const Part& part : parts) {
            if (treatment_.strip && is_accent(part.code)) continue;
            if (treatment_.strip && part.combining != 0) return entry_of(Action::marks);
            finish(part.code, elements);
        }
        if (elements.empty()) return entry_of(Action::drop);
        if (apart && elements.size() == 1 && elements[0].kind == Kind::word) elements[0].kind = Kind::alone;
        const bool itself = elements.size() == 1 && elements[0].code == code;
        if (elements.size() == 1 && elements[0].kind == Kind::blank) return entry_of(Action::blank);
        if (itself) return entry_of(elements[0].kind == Kind::alone ? Action::alone : Action::keep);
        if (elements.size() == 1 && elements[0].kind == Kind::word) return entry_of(Action::swap, elements[0].code);
        if (apart && elements.size() > 1) {
            elements.insert(elements.begin(), {' ', Kind::blank});
            elements.push_back({' ', Kind::blank});
        }
        const auto place = static_cast<std::uint32_t>(lists_.size());
        lists_.push_back({static_cast<std::uint32_t>(elements.size()), Kind::word});
        lists_.insert(lists_.end(), elements.begin(), elements.end());
        return entry_of(Action::list, place);
    }

    Treatment treatment_;
    std::vector<std::uint8_t> flags_;
    std::vector<std::uint16_t> blocks_;
    std::vector<std::uint32_t> entries_;
    std::vector<Element> lists_;            // each after an element whose code is their number
    std::vector<std::uint32_t> decomposed_;  // places in kDecomposed, by code point
};

}  // namespace mdata::wordpiece
