// WordPiece with BERT's normalizer and pre-tokenizer: UTF-8 in, ids out, equal to those of the `tokenizers` library.
//
// One pass over the text: characters are handled by a table (wordpiece_characters.hpp) and collected into a word; a
// short word is looked up as a whole, otherwise it is divided from the left, the longest entry first. A word with too
// many characters is counted and not stored, so memory does not depend on the text; time is linear in its length. Added
// tokens are cut out of the raw text first. A text with a code point on which Unicode editions differ is not encoded
// but listed in Batch::left. The readable twin is tests/reference/wordpiece.py.
//
// Any number of threads may encode with one Encoder: only a Memo changes, and each call has its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "spares.hpp"
#include "utf8.hpp"
#include "wordpiece_characters.hpp"
#include "wordpiece_trie.hpp"

namespace mdata::wordpiece {

struct Settings {
    std::string prefix;        // of entries that go on with a word
    std::size_t most_chars;    // of a word; longer ones are unknown
    std::int32_t unknown;      // the id of words that no entries cover
    Treatment treatment;
};

struct Batch {
    std::vector<std::int32_t> ids;
    std::vector<std::int64_t> lengths;  // of each text; 0 for those in `left`
    std::vector<std::int64_t> left;     // the texts that are for the exact library
};

// The code point at `at`; `next` is set behind it. Bytes are trusted to be UTF-8, but nothing behind `end` is read.
inline std::uint32_t decode(const unsigned char* at, const unsigned char* end, const unsigned char*& next) {
    const auto rest = [&](int place) { return static_cast<std::uint32_t>(at[place] & 0x3F); };
    const auto room = end - at;
    const std::uint32_t lead = *at;
    next = at + 1;
    if (lead < 0x80) return lead;
    if (lead < 0xC2 || lead > 0xF4) return 0xFFFD;
    if (lead < 0xE0) {
        if (room < 2) return 0xFFFD;
        next = at + 2;
        return (lead & 0x1F) << 6 | rest(1);
    }
    if (lead < 0xF0) {
        if (room < 3) return 0xFFFD;
        next = at + 3;
        return (lead & 0x0F) << 12 | rest(1) << 6 | rest(2);
    }
    if (room < 4) return 0xFFFD;
    const std::uint32_t code = (lead & 0x07) << 18 | rest(1) << 12 | rest(2) << 6 | rest(3);
    if (code >= kCodePoints) return 0xFFFD;
    next = at + 4;
    return code;
}

// The word that is being gathered. At least Memo::kMostBytes bytes of `data` can be read.
class Word {
public:
    explicit Word(std::size_t most_chars) : most_chars_(most_chars), data_(512) {}

    const char* data() const { return data_.data(); }
    std::size_t size() const { return size_; }
    bool empty() const { return chars_ == 0; }
    std::size_t most_chars() const { return most_chars_; }
    bool too_long() const { return chars_ > most_chars_; }
    void clear() { size_ = chars_ = 0; }

    void push(std::uint32_t code) {
        if (++chars_ > most_chars_) return;
        size_ += write_code(code, reserve(4));
    }

    // A run of ASCII characters that stay in a word, each as `become` says; the first surely does, a 0 ends the run.
    const unsigned char* push_ascii(const unsigned char* at, const unsigned char* end, const char* become) {
        if (chars_ >= most_chars_) {
            chars_ = most_chars_ + 1;
            while (at < end && become[*at] != 0) ++at;
            return at;
        }
        const std::size_t room = std::min({static_cast<std::size_t>(end - at), most_chars_ - chars_, kMostAtOnce});
        char* const begin = reserve(room);
        char* to = begin;
        for (const unsigned char* const stop = at + room; at < stop && become[*at] != 0; ++at) *to++ = become[*at];
        size_ += static_cast<std::size_t>(to - begin);
        chars_ += static_cast<std::size_t>(to - begin);
        return at;
    }

private:
    char* reserve(std::size_t bytes) {
        if (data_.size() - size_ < bytes) data_.resize(2 * (size_ + bytes));
        return data_.data() + size_;
    }

    static constexpr std::size_t kMostAtOnce = 256;

    std::size_t most_chars_;
    std::vector<char> data_;
    std::size_t size_ = 0, chars_ = 0;
};

// Text to words.
class Normalizer {
public:
    explicit Normalizer(Treatment treatment) : characters_(treatment), become_(256, 0) {
        for (std::uint32_t code = 1; code < 0x80; ++code) {
            const std::uint32_t entry = characters_.entry(code);
            const Action action = Characters::action(entry);
            if (action == Action::keep) become_[code] = static_cast<char>(code);
            if (action == Action::swap) become_[code] = static_cast<char>(Characters::payload(entry));
        }
    }

    // Calls emit(word) for each word of a part of a text. False: the text is for the exact library.
    template <typename Emit>
    bool words(std::string_view text, Word& word, const Emit& emit) const {
        const auto* at = reinterpret_cast<const unsigned char*>(text.data());
        const auto* const end = at + text.size();
        const auto flush = [&] {
            if (word.empty()) return;
            emit(word);
            word.clear();
        };
        const auto put = [&](const Element& element) {
            if (element.kind != Kind::word) flush();
            if (element.kind != Kind::blank) word.push(element.code);
            if (element.kind == Kind::alone) flush();
        };
        word.clear();
        while (at < end) {
            if (become_[*at] != 0) {
                at = word.push_ascii(at, end, become_.data());
                continue;
            }
            const unsigned char* next = nullptr;
            const std::uint32_t code = decode(at, end, next);
            const std::uint32_t entry = characters_.entry(code);
            switch (Characters::action(entry)) {
                case Action::keep: word.push(code); break;
                case Action::drop: break;
                case Action::blank: flush(); break;
                case Action::alone: put({code, Kind::alone}); break;
                case Action::swap: word.push(Characters::payload(entry)); break;
                case Action::list:
                    for (const Element& element : characters_.list(Characters::payload(entry))) put(element);
                    break;
                case Action::hangul: push_hangul(code, word); break;
                case Action::marks: next = put_run(at, end, word.most_chars(), put); break;
                case Action::left: word.clear(); return false;
            }
            at = next;
        }
        flush();
        return true;
    }

private:
    // A syllable is two or three letters, by arithmetic.
    static void push_hangul(std::uint32_t code, Word& word) {
        const std::uint32_t syllable = code - 0xAC00;
        word.push(0x1100 + syllable / 588);
        word.push(0x1161 + syllable % 588 / 28);
        if (syllable % 28 != 0) word.push(0x11A7 + syllable % 28);
    }

    // From a code point with marks that stay: its letter, then these marks and those that follow, by combining class.
    template <typename Put>
    const unsigned char* put_run(const unsigned char* at, const unsigned char* end, std::size_t most_chars,
                                 const Put& put) const {
        std::vector<Part> marks, parts;
        std::vector<Element> elements;
        for (bool first = true; at < end; first = false) {
            const unsigned char* next = nullptr;
            const std::uint32_t code = decode(at, end, next);
            if (!characters_.is_dropped_first(code)) {
                parts.clear();
                characters_.decompose(code, parts);
                if (!first && parts[0].combining == 0) break;
                for (const Part& part : parts) {
                    if (characters_.is_accent(part.code)) continue;
                    if (part.combining == 0) characters_.finish(part.code, elements);
                    // More of them than a word may have: it is too long in any order.
                    else if (marks.size() <= most_chars) marks.push_back(part);
                }
            }
            at = next;
        }
        std::stable_sort(marks.begin(), marks.end(),
                         [](const Part& a, const Part& b) { return a.combining < b.combining; });
        for (const Part& mark : marks) characters_.finish(mark.code, elements);
        for (const Element& element : elements) put(element);
        return at;
    }

    Characters characters_;
    std::vector<char> become_;
};

class Encoder {
public:
    // Values of `added` are ids, or -1 for a token that is found and then left as text.
    Encoder(std::span<const Item> vocabulary, std::span<const Item> added, const Settings& settings)
        : Encoder(vocabulary, added, settings, std::make_shared<const Normalizer>(settings.treatment)) {}

    // The same with a normalizer of that treatment; making one takes some milliseconds.
    Encoder(std::span<const Item> vocabulary, std::span<const Item> added, const Settings& settings,
            std::shared_ptr<const Normalizer> normalizer)
        : settings_(settings),
          normalizer_(std::move(normalizer)),
          short_words_(vocabulary),
          begins_(vocabulary),
          goes_on_(without_prefix(vocabulary, settings.prefix)),
          added_(added),
          added_begins_(256, 0) {
        for (const Item& token : added)
            if (!token.text.empty()) added_begins_[static_cast<unsigned char>(token.text[0])] = 1;
    }

    // Ids of each text, `before` and `after` around them (not around texts that are left).
    Batch encode(std::span<const std::string_view> texts, std::span<const std::int32_t> before,
                 std::span<const std::int32_t> after) const {
        Batch batch;
        Word word(settings_.most_chars);
        std::unique_ptr<Memo> memo = memos_.take([] { return std::make_unique<Memo>(); });
        batch.lengths.reserve(texts.size());
        std::size_t bytes = 0;
        for (const std::string_view text : texts) bytes += text.size();
        batch.ids.reserve(bytes / 4 + texts.size() * (before.size() + after.size()));
        for (std::size_t number = 0; number < texts.size(); ++number) {
            const std::size_t start = batch.ids.size();
            batch.ids.insert(batch.ids.end(), before.begin(), before.end());
            if (encode_text(texts[number], word, *memo, batch.ids)) {
                batch.ids.insert(batch.ids.end(), after.begin(), after.end());
            } else {
                batch.ids.resize(start);
                batch.left.push_back(static_cast<std::int64_t>(number));
            }
            batch.lengths.push_back(static_cast<std::int64_t>(batch.ids.size() - start));
        }
        memos_.give_back(std::move(memo));
        return batch;
    }

    // The words of a text as they are looked up, added tokens not regarded. False: it is for the exact library.
    bool words(std::string_view text, std::vector<std::string>& found) const {
        Word word(settings_.most_chars);
        return normalizer_->words(text, word, [&](const Word& one) { found.emplace_back(one.data(), one.size()); });
    }

private:
    static std::vector<Item> without_prefix(std::span<const Item> vocabulary, std::string_view prefix) {
        std::vector<Item> found;
        for (Item item : vocabulary) {
            if (!item.text.starts_with(prefix)) continue;
            item.text.remove_prefix(prefix.size());
            found.push_back(item);
        }
        return found;
    }

    bool encode_text(std::string_view text, Word& word, Memo& memo, std::vector<std::int32_t>& ids) const {
        const auto emit = [&](const Word& one) { put_word(one, memo, ids); };
        std::size_t begin = 0;
        for (std::size_t at = next_added(text, 0); at < text.size();) {
            const Trie::Match match = added_.longest(text.data() + at, text.size() - at);
            if (match.size != 0 && match.value >= 0) {
                if (!normalizer_->words(text.substr(begin, at - begin), word, emit)) return false;
                ids.push_back(match.value);
                begin = at + match.size;
            }
            at = next_added(text, at + std::max<std::size_t>(match.size, 1));
        }
        return normalizer_->words(text.substr(begin), word, emit);
    }

    // The next place where a token may begin.
    std::size_t next_added(std::string_view text, std::size_t at) const {
        while (at < text.size() && !added_begins_[static_cast<unsigned char>(text[at])]) ++at;
        return at;
    }

    void put_word(const Word& word, Memo& memo, std::vector<std::int32_t>& ids) const {
        if (word.too_long()) {
            ids.push_back(settings_.unknown);
            return;
        }
        if (word.size() <= ShortWords::kMostBytes) {
            const std::int32_t id = short_words_.find(word.data(), word.size());
            if (id != ShortWords::kNone) {
                ids.push_back(id);
                return;
            }
        }
        if (word.size() > Memo::kMostBytes) return put_pieces(word, ids);
        Memo::Place place = memo.find(word.data(), word.size());
        if (place.known()) {
            ids.insert(ids.end(), place.ids().begin(), place.ids().end());
            return;
        }
        const std::size_t before = ids.size();
        put_pieces(word, ids);
        place.put(std::span(ids).subspan(before));
    }

    void put_pieces(const Word& word, std::vector<std::int32_t>& ids) const {
        const std::size_t before = ids.size();
        for (std::size_t at = 0; at < word.size();) {
            const Trie::Match match = (at == 0 ? begins_ : goes_on_).longest(word.data() + at, word.size() - at);
            if (match.size == 0) {
                ids.resize(before);
                ids.push_back(settings_.unknown);
                return;
            }
            ids.push_back(match.value);
            at += match.size;
        }
    }

    Settings settings_;
    std::shared_ptr<const Normalizer> normalizer_;
    ShortWords short_words_;
    Trie begins_, goes_on_, added_;
    std::vector<unsigned char> added_begins_;
    mutable Spares<Memo> memos_;
};

}  // namespace mdata::wordpiece
