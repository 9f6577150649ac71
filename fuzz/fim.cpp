// Fill in the middle (mdata_cpp/fim.hpp): rows of any ids under any rule.
//
// A row comes out as a plain reading of the rules gives it, with the same draws; nothing is written behind it. Where the
// ids that name parts stand in no text, taking them away leaves each id as often as it was, but for the ends of empty
// documents.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "fim.hpp"
#include "input.hpp"

namespace {

using Ids = std::vector<std::int64_t>;

Ids part(const Ids& text, std::size_t from, std::size_t to) {
    return {text.begin() + static_cast<std::ptrdiff_t>(from), text.begin() + static_cast<std::ptrdiff_t>(to)};
}

void append(Ids& out, const Ids& more) { out.insert(out.end(), more.begin(), more.end()); }

Ids permuted(const mdata::FimRule& rule, mdata::KeyedStream& draws, const Ids& text, double rate) {
    if (!(draws.real() < rate)) return text;
    const auto& same = rule.untouched;
    if (!same.empty() && same.size() <= text.size() && part(text, 0, same.size()) == same) return text;
    const std::size_t one = draws.up_to(text.size()), other = draws.up_to(text.size());
    const Ids prefix = part(text, 0, std::min(one, other)), suffix = part(text, std::max(one, other), text.size());
    const Ids middle = part(text, std::min(one, other), std::max(one, other));
    const bool suffix_first = draws.real() < rule.spm_rate;
    Ids out{rule.prefix};
    if (!suffix_first) append(out, prefix);
    out.push_back(rule.suffix);
    append(out, suffix);
    out.push_back(rule.middle);
    if (suffix_first) append(out, prefix);
    append(out, middle);
    return out;
}

// `change` of what stands before each mark, unless that is empty, with the mark; then of the rest.
template <typename Change>
Ids each(const Ids& text, std::int64_t mark, Change change) {
    Ids out, one;
    for (const std::int64_t id : text) {
        if (id != mark) {
            one.push_back(id);
        } else if (!one.empty()) {
            append(out, change(std::exchange(one, {})));
            out.push_back(mark);
        }
    }
    append(out, change(one));
    return out;
}

Ids expected(const mdata::FimRule& rule, mdata::KeyedStream& draws, const Ids& text) {
    return each(text, rule.eod, [&](const Ids& stretch) {
        if (!rule.split || std::count(stretch.begin(), stretch.end(), *rule.split) == 0) {
            return permuted(rule, draws, stretch, rule.rate);
        }
        if (!(draws.real() < rule.rate)) return stretch;
        return each(stretch, *rule.split, [&](const Ids& one) { return permuted(rule, draws, one, rule.fragment_rate); });
    });
}

double rate(ByteSource& input) {
    const std::uint8_t kind = input.byte();
    return kind < 250 ? kind / 200.0 : std::bit_cast<double>(input.number());
}

mdata::FimRule rule_of(ByteSource& input) {
    const auto id = [&] { return input.number() % 16; };
    const bool apart = input.byte() & 1;  // P, M and S in no text
    mdata::FimRule rule{apart ? 100 : id(), apart ? 101 : id(), apart ? 102 : id(), id(), {}, {}, 0, 0, 0};
    if (input.byte() & 1) rule.split = id();
    rule.untouched = input.numbers(3);
    rule.rate = rate(input);
    rule.spm_rate = rate(input);
    rule.fragment_rate = rate(input);
    return rule;
}

void nothing_is_lost(const mdata::FimRule& rule, const Ids& text, const Ids& made) {
    std::map<std::int64_t, std::int64_t> left;
    for (const std::int64_t id : text) ++left[id];
    for (const std::int64_t id : made) --left[id];
    for (const auto& [id, count] : left) {
        const bool names_a_part = id >= 100 && id <= 102, is_mark = id == rule.eod || id == rule.split;
        REQUIRE(names_a_part || (is_mark ? count >= 0 : count == 0));
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    ByteSource input(data, size);
    const mdata::FimRule rule = rule_of(input);
    const mdata::KeyedStream draws({static_cast<std::uint64_t>(input.number()), 3}, static_cast<std::uint64_t>(input.number()));
    Ids scratch;
    for (int rows = 1 + input.byte() % 3; rows > 0; --rows) {
        Ids row(input.byte() % 120);
        const std::size_t limit = row.empty() ? 0 : input.byte() % (row.size() + 1);
        const std::size_t count = row.empty() ? 0 : input.byte() % (row.size() + 1);
        for (std::size_t i = 0; i < count; ++i) row[i] = input.byte() % 16;
        const Ids text = part(row, 0, count);
        mdata::KeyedStream again = draws;
        const Ids wanted = expected(rule, again, text);
        const auto kept = mdata::fim_row(rule, draws, row, count, limit, -3, scratch);
        REQUIRE(scratch == wanted);
        REQUIRE(kept == static_cast<std::int64_t>(std::min(wanted.size(), limit)));
        for (std::size_t i = 0; i < row.size(); ++i) REQUIRE(row[i] == (i < static_cast<std::size_t>(kept) ? wanted[i] : -3));
        if (rule.prefix == 100) nothing_is_lost(rule, text, wanted);
    }
    return 0;
}
