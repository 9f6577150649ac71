// Sentence splitting by Punkt: the rules of docs/reference/sentences.md with a language's tables, in linear time for any text.
// Twin: mdata/sentences/punkt_reference.py; the reference is NLTK 3.10.
//
// A text is a span of code points of 1, 2 or 4 bytes, as Python stores them. Every position that may end a sentence is
// decided by its context: the word before it, the position itself, and the mark or the word after it, which are
// adjacent in the text. Two such contexts share at most a word, which is why the time is linear.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "punkt_unicode.hpp"

namespace mdata::punkt {

// What the table says of a code point. kCased: cased, and not looked past; kIgnorable: looked past when a final sigma is
// told from others; kNewer: the running Python has to be asked.
enum Flag : unsigned { kUpper = 1, kLower = 2, kLetter = 4, kDigit = 8, kCased = 16, kIgnorable = 32, kNewer = 64 };

inline const Kind& kind_of(char32_t code) {
    const auto* run = std::upper_bound(std::begin(kRuns), std::end(kRuns), static_cast<std::uint32_t>(code) << 8 | 255U);
    return kKinds[*std::prev(run) & 255U];
}

// What Python was asked.
struct Facts {
    unsigned flags = 0;
    std::u32string lower;
};
using Newer = std::unordered_map<char32_t, Facts>;

// Parts that characters play in patterns. kBlank: ASCII white space; kStripped: what str.strip takes; kJoint: hyphen,
// full stop and comma, which end a word only before certain others.
enum Class : unsigned {
    kEnd = 1,
    kNonWord = 2,
    kNoStart = 4,
    kSpace = 8,
    kBlank = 16,
    kStripped = 32,
    kClosing = 64,
    kJoint = 128,
};

inline constexpr unsigned kCurly = kNonWord | kClosing;

constexpr std::array<std::uint8_t, 256> make_classes() {
    std::array<std::uint8_t, 256> classes{};
    const auto add = [&](std::string_view characters, unsigned flag) {
        for (const char c : characters) {
            auto& flags = classes[static_cast<std::uint8_t>(c)];
            flags = static_cast<std::uint8_t>(flags | flag);
        }
    };
    add(".?!", kEnd);
    add(")\";}]*:@'({[?!", kNonWord);
    add("(\"`{[:;&#*@)}]-,", kNoStart);
    add(" \t\n\v\f\r\x85\xA0", kSpace);
    add(" \t\n\v\f\r", kBlank);
    add(" \t\n\v\f\r\x85\xA0\x1C\x1D\x1E\x1F", kStripped);
    add("\"')]}", kClosing);
    add("-.,", kJoint);
    add("\xAB\xBB", kCurly);
    return classes;
}

inline constexpr std::array<std::uint8_t, 256> kClasses = make_classes();

inline unsigned wide_class(char32_t c) {
    if (c == 0x2018 || c == 0x2019 || c == 0x201C || c == 0x201D) return kCurly;
    const bool space = c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
                       c == 0x205F || c == 0x3000;
    return space ? kSpace | kStripped : 0U;
}

template <typename Char>
unsigned class_of(Char c) {
    if constexpr (sizeof(Char) == 1) return kClasses[c];
    else return c < 256 ? kClasses[c] : c < 0x1680 || c > 0x3000 ? 0U : wide_class(c);
}

// A word of the tables. Bits of contexts: see mdata/sentences/punkt_tables.py.
struct Entry {
    bool abbreviation = false;
    bool starter = false;
    bool begins_pair = false;
    std::uint8_t bits = 0;
    std::uint32_t number = 0;
};

inline constexpr unsigned kUpperSeen = 14, kInsideUpper = 4, kLowerSeen = 112, kStartLower = 16;

class Tables {
public:
    void add_abbreviation(const std::u32string& word) { entry(word).abbreviation = true; }
    void add_starter(const std::u32string& word) { entry(word).starter = true; }
    void add_context(const std::u32string& word, std::uint8_t bits) { entry(word).bits = bits; }
    void add_collocation(const std::u32string& first, const std::u32string& second) {
        const std::uint32_t number = entry(second).number;
        Entry& begin = entry(first);
        begin.begins_pair = true;
        pairs_.insert(std::uint64_t{begin.number} << 32 | number);
    }

    // nullptr: in no table.
    const Entry* find(std::u32string_view word) const {
        const auto found = entries_.find(word);
        return found == entries_.end() ? nullptr : &found->second;
    }
    bool is_collocation(const Entry& first, const Entry& second) const {
        return pairs_.contains(std::uint64_t{first.number} << 32 | second.number);
    }

private:
    struct Hash {
        using is_transparent = void;
        std::size_t operator()(std::u32string_view word) const { return std::hash<std::u32string_view>{}(word); }
    };

    Entry& entry(const std::u32string& word) {
        const auto [place, added] = entries_.try_emplace(word);
        if (added) place->second.number = static_cast<std::uint32_t>(entries_.size());
        return place->second;
    }

    std::unordered_map<std::u32string, Entry, Hash, std::equal_to<>> entries_;
    std::unordered_set<std::uint64_t> pairs_;
};

struct Span {
    std::size_t start;
    std::size_t stop;
};

// Splits texts of one width; keeps its memory from text to text.
template <typename Char>
class Splitter {
public:
    Splitter(const Tables& tables, const Newer& newer, bool keep_newlines)
        : tables_(tables), newer_(newer), keep_newlines_(keep_newlines) {}

    // Appends the sentences of `text`, each moved by `offset`.
    void split(std::span<const Char> text, std::size_t offset, std::vector<Span>& sentences) {
        text_ = text;
        pieces_.clear();
        kept_ = {};
        has_kept_ = false;
        last_break_ = 0;
        keep_newlines_ ? candidates_keeping() : candidates();
        if (has_kept_) judge(kept_);
        std::size_t end = text.size();
        while (end > 0 && is(end - 1, kStripped)) --end;
        pieces_.push_back({last_break_, end});
        realign(offset, sentences);
    }

    // Whether a code point came up of which only the running Python knows, and `newer` does not tell.
    bool unsure() const { return unsure_; }

private:
    static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

    // [start, end) is what a pattern would take; `next` is where the next word begins, kNone before a non-word character.
    struct Candidate {
        std::size_t start = 0, end = 0, next = kNone, word = 0;
    };
    struct Token {
        std::size_t start = 0, stop = 0;
        bool breaks = false, abbreviates = false, is_lower = false;
        std::u32string lower;
    };
    enum class Answer { no, yes, unknown };

    bool is(std::size_t i, unsigned classes) const { return (class_of(text_[i]) & classes) != 0; }

    std::size_t skip_space(std::size_t i) const {
        while (i < text_.size() && is(i, kSpace)) ++i;
        return i;
    }
    std::size_t skip_run(std::size_t i) const {
        while (i < text_.size() && !is(i, kSpace)) ++i;
        return i;
    }

    void candidates() {
        const std::size_t size = text_.size();
        for (std::size_t i = 0; i + 1 < size; ++i) {
            if (!is(i, kEnd)) continue;
            const unsigned after = class_of(text_[i + 1]);
            if (after & kNonWord) {
                offer(i, i + 1, kNone);
            } else if (after & kSpace) {
                const std::size_t next = skip_space(i + 1);
                if (next < size) offer(i, i + 1, next);
            }
        }
    }

    // A candidate takes a run from where the last one stopped to its last end mark that has something behind it.
    void candidates_keeping() {
        for (std::size_t start = skip_space(0); start < text_.size(); start = skip_space(start)) {
            const std::size_t stop = skip_run(start), next = skip_space(stop);
            std::size_t end = stop;
            while (end > start && !(is(end - 1, kEnd) && (end < stop || next < text_.size()))) --end;
            if (end > start) {
                if (end == stop) end = next;
                offer(start, end, is(end, kNonWord) ? kNone : end);
                start = end;
            } else {
                start = stop;
            }
        }
    }

    // Decides where the candidate's word begins; one that begins before the candidate kept takes its place.
    void offer(std::size_t start, std::size_t end, std::size_t next) {
        std::size_t word = start;
        while (word > kept_.start + 1 && !is(word - 1, kBlank)) --word;
        if (word <= kept_.start + 1) word = kept_.word;
        if (has_kept_ && kept_.start <= word) judge(kept_);
        kept_ = {start, end, next, word};
        has_kept_ = true;
    }

    void judge(const Candidate& candidate) {
        const bool has_next = candidate.next != kNone;
        const std::size_t stop = has_next ? skip_run(candidate.next) : candidate.end + 1;
        if (!breaks(candidate.word, stop)) return;
        pieces_.push_back({last_break_, candidate.end});
        last_break_ = has_next ? candidate.next : candidate.end;
    }

    // Whether a token of the context that is not its last one ends a sentence.
    bool breaks(std::size_t start, std::size_t stop) {
        bool has_before = false;
        while (start < stop) {
            std::size_t end = start;
            while (end < stop && text_[end] != '\n') ++end;
            std::size_t first = start;
            while (first < end && is(first, kStripped)) ++first;
            std::size_t at = first == end ? end : start;
            while (take_token(at, end)) {
                first_pass(token_);
                if (has_before && second_pass(before_, token_)) return true;
                std::swap(before_, token_);
                has_before = true;
            }
            start = end + 1;
        }
        return false;
    }

    // The next token of the line that ends at `end`, into token_; `at` moves behind it.
    bool take_token(std::size_t& at, std::size_t end) {
        while (at < end && is(at, kSpace)) ++at;
        if (at == end) return false;
        token_.start = at;
        if (begins_mark(at, end)) {
            at = end_of_mark(at, end);
        } else if (is(at++, kNoStart)) {
            // one character
        } else {
            while (at < end && !ends_word(at, end)) ++at;
        }
        token_.stop = at;
        return true;
    }

    bool ends_word(std::size_t i, std::size_t end) const {
        const unsigned classes = class_of(text_[i]);
        if (!(classes & (kSpace | kNonWord | kJoint))) return false;
        if (classes & (kSpace | kNonWord)) return true;
        if (text_[i] != ',') return begins_mark(i, end);
        return i + 1 == end || is(i + 1, kSpace | kNonWord) || begins_mark(i + 1, end);
    }

    // Two or more hyphens, two or more full stops, or three or more with one white space between them.
    bool begins_mark(std::size_t i, std::size_t end) const {
        const Char c = text_[i];
        if ((c != '-' && c != '.') || i + 1 >= end) return false;
        return text_[i + 1] == c || (c == '.' && spaced(i, end) && spaced(i + 2, end));
    }
    // A full stop, white space, a full stop.
    bool spaced(std::size_t i, std::size_t end) const {
        return i + 2 < end && text_[i] == '.' && is(i + 1, kSpace) && text_[i + 2] == '.';
    }
    std::size_t end_of_mark(std::size_t i, std::size_t end) const {
        const Char c = text_[i];
        if (text_[i + 1] == c) {
            while (i < end && text_[i] == c) ++i;
            return i;
        }
        while (spaced(i, end)) i += 2;
        return i + 1;
    }

    void first_pass(Token& token) {
        token.breaks = token.abbreviates = token.is_lower = false;
        if (token.stop - token.start == 1) {
            token.breaks = is(token.start, kEnd);
        } else if (text_[token.stop - 1] != '.') {
            return;
        } else if (text_[token.stop - 2] == '.') {
            token.abbreviates = true;
            for (std::size_t i = token.start; i < token.stop; ++i) token.abbreviates &= text_[i] == '.';
        } else {
            const std::u32string_view word = without_period(lower(token));
            token.abbreviates = is_abbreviation(word) || is_abbreviation(word.substr(word.rfind(U'-') + 1));
            token.breaks = !token.abbreviates;
        }
    }

    bool is_abbreviation(std::u32string_view word) const {
        const Entry* entry = tables_.find(word);
        return entry != nullptr && entry->abbreviation;
    }

    // Whether `token` ends a sentence, now that the token after it is known.
    bool second_pass(Token& token, Token& after) {
        if (text_[token.stop - 1] != '.') return token.breaks;
        const bool number = is_number(lower(token));
        const Entry* first = tables_.find(number ? kNumber : without_period(token.lower));
        if (first != nullptr && first->begins_pair) {
            const Entry* second = tables_.find(type_after(after));
            if (second != nullptr && tables_.is_collocation(*first, *second)) return false;
        }
        const bool initial = token.stop - token.start == 2 && (flags_of(text_[token.start]) & kLetter);
        const bool abbreviation = token.abbreviates && !initial;
        if (!abbreviation && !initial && !number) return token.breaks;

        const Entry* type = tables_.find(type_after(after));
        const unsigned bits = type == nullptr ? 0 : type->bits;
        const bool upper = flags_of(text_[after.start]) & kUpper;
        const Answer starts = starts_sentence(after, bits, upper);
        if (abbreviation && (starts == Answer::yes || (upper && type != nullptr && type->starter))) return true;
        if (initial || number) {
            if (starts == Answer::no) return false;
            if (starts == Answer::unknown && initial && upper && !(bits & kLowerSeen)) return false;
        }
        return token.breaks;
    }

    Answer starts_sentence(const Token& token, unsigned bits, bool upper) {
        const Char c = text_[token.start];
        if (token.stop - token.start == 1 && (is(token.start, kEnd) || c == ';' || c == ':' || c == ',')) return Answer::no;
        if (upper && (bits & kLowerSeen) && !(bits & kInsideUpper)) return Answer::yes;
        if ((flags_of(c) & kLower) && ((bits & kUpperSeen) || !(bits & kStartLower))) return Answer::no;
        return Answer::unknown;
    }

    // The type of a successor.
    std::u32string_view type_after(Token& token) {
        if (is_number(lower(token))) return kNumber;
        return token.breaks ? without_period(token.lower) : std::u32string_view(token.lower);
    }

    static constexpr std::u32string_view kNumber = U"##number##";

    static std::u32string_view without_period(std::u32string_view word) {
        return word.size() > 1 && word.back() == U'.' ? word.substr(0, word.size() - 1) : word;
    }

    bool is_number(std::u32string_view word) {
        std::size_t i = word.starts_with(U'-');
        if (i < word.size() && (word[i] == U'.' || word[i] == U',')) ++i;
        if (i == word.size() || !is_digit(word[i])) return false;
        for (; i < word.size(); ++i) {
            const char32_t c = word[i];
            if (c != U',' && c != U'.' && c != U'-' && !is_digit(c)) return false;
        }
        return true;
    }
    bool is_digit(char32_t c) { return c < 128 ? c >= U'0' && c <= U'9' : (flags_of(c) & kDigit) != 0; }

    unsigned flags_of(char32_t c) {
        const unsigned flags = kind_of(c).flags;
        if (!(flags & kNewer)) return flags;
        const auto found = newer_.find(c);
        unsure_ |= found == newer_.end();
        return found == newer_.end() ? 0U : found->second.flags;
    }

    // A token as Python's str.lower makes it.
    const std::u32string& lower(Token& token) {
        if (token.is_lower) return token.lower;
        token.is_lower = true;
        token.lower.clear();
        for (std::size_t i = token.start; i < token.stop; ++i) {
            const char32_t c = text_[i];
            if (c < 128) token.lower += c >= U'A' && c <= U'Z' ? c + 32 : c;
            else if (c == 0x130) token.lower += U"i\u0307";
            else if (c == 0x3A3) token.lower += is_final_sigma(token, i) ? U'\u03C2' : U'\u03C3';
            else append_lower(c, token.lower);
        }
        return token.lower;
    }

    void append_lower(char32_t c, std::u32string& out) {
        const Kind& kind = kind_of(c);
        if (!(kind.flags & kNewer)) {
            out += static_cast<char32_t>(static_cast<std::int32_t>(c) + kind.to_lower);
        } else if (const auto found = newer_.find(c); found != newer_.end()) {
            out += found->second.lower;
        } else {
            unsure_ = true;
        }
    }

    // A cased character before it and none after it, ignorable ones looked past.
    bool is_final_sigma(const Token& token, std::size_t i) {
        std::size_t before = i, after = i + 1;
        while (before > token.start && (flags_of(text_[before - 1]) & kIgnorable)) --before;
        if (before == token.start || !(flags_of(text_[before - 1]) & kCased)) return false;
        while (after < token.stop && (flags_of(text_[after]) & kIgnorable)) ++after;
        return after == token.stop || !(flags_of(text_[after]) & kCased);
    }

    // Closing quotes and brackets at the start of a piece go to the end of the one before; empty pieces are left out.
    void realign(std::size_t offset, std::vector<Span>& sentences) {
        for (std::size_t number = 0; number < pieces_.size(); ++number) {
            Span piece = pieces_[number];
            if (number + 1 < pieces_.size()) {
                Span& next = pieces_[number + 1];
                if (const std::size_t marks = closing_marks(next)) {
                    piece.stop = next.start + marks;
                    next.start = piece.stop;
                    while (next.start < next.stop && is(next.start, kSpace)) ++next.start;
                }
            }
            if (piece.start < piece.stop) sentences.push_back({piece.start + offset, piece.stop + offset});
        }
    }

    std::size_t closing_marks(const Span& piece) const {
        std::size_t i = piece.start;
        while (i < piece.stop && is(i, kClosing)) ++i;
        if (i == piece.start) return 0;
        const bool dash = i + 1 < piece.stop && text_[i] == '-' && text_[i + 1] == '-';
        return i == piece.stop || is(i, kSpace) || dash ? i - piece.start : 0;
    }

    const Tables& tables_;
    const Newer& newer_;
    const bool keep_newlines_;
    bool unsure_ = false;
    std::span<const Char> text_;
    std::vector<Span> pieces_;
    Candidate kept_;
    bool has_kept_ = false;
    std::size_t last_break_ = 0;
    Token before_, token_;
};

}  // namespace mdata::punkt
