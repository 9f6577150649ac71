// Texts to ids with a SentencePiece model of the BPE kind: prepare, split where no piece can cross, encode words.
//
// Two adjacent characters that no piece contains side by side can never be in one symbol, and merges on one side of
// them do not change those on the other. So a text is split there, and every part is encoded once and cached.
// User-defined pieces are matched first, the longest at each position, and also split the text. Text that is not a
// piece becomes its bytes, or, with its unknown neighbours, one unknown id. Not for models with unused pieces, nor for
// those that do not escape blanks.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sentencepiece_merges.hpp"
#include "sentencepiece_text.hpp"
#include "sentencepiece_words.hpp"
#include "spares.hpp"

namespace mdata::sp {

struct Facts {
    TextRules rules;
    std::vector<Piece> pieces;       // the ordinary ones, blanks written as ' '
    std::vector<Piece> user_pieces;  // the same of those that are defined for users
    std::int32_t unknown_id = 0;
    std::vector<std::int32_t> byte_ids;  // 256, or none
};

// Ids of many texts, one after another. Room is made for a whole text at once; what is not written yet is left as it is.
class Ids {
   public:
    std::size_t size() const { return size_; }
    const std::int32_t* data() const { return data_.get(); }

    // Forget all ids; memory is kept, if it is not much.
    void clear() {
        size_ = 0;
        if (capacity_ > kMostKept) data_.reset();
        if (data_ == nullptr) capacity_ = 0;
    }

    // Where the next id goes, with room for so many.
    std::int32_t* room(std::size_t count) {
        if (size_ + count > capacity_) {
            capacity_ = std::max(size_ + count, 2 * capacity_);
            auto larger = std::make_unique_for_overwrite<std::int32_t[]>(capacity_);
            if (size_ != 0) std::memcpy(larger.get(), data_.get(), 4 * size_);
            data_ = std::move(larger);
        }
        return data_.get() + size_;
    }

    // What was written to `room` ends here.
    void end_at(const std::int32_t* end) { size_ = static_cast<std::size_t>(end - data_.get()); }

   private:
    static constexpr std::size_t kMostKept = std::size_t{16} << 20;
    std::unique_ptr<std::int32_t[]> data_;
    std::size_t size_ = 0;
    std::size_t capacity_ = 0;
};

// What does not change while texts are encoded.
struct Model {
    explicit Model(const Facts& facts)
        : preparer(facts.rules),
          merges(facts.pieces),
          user(entries(facts.user_pieces)),
          unknown_id(facts.unknown_id),
          byte_ids(facts.byte_ids) {}

    Preparer preparer;
    Merges merges;
    Trie user;
    std::int32_t unknown_id;
    std::vector<std::int32_t> byte_ids;

   private:
    static std::vector<Trie::Entry> entries(const std::vector<Piece>& pieces) {
        std::vector<Trie::Entry> entries;
        for (const Piece& piece : pieces) entries.push_back({piece.text, piece.id});
        return entries;
    }
};

// A model with working memory for one caller at a time.
class BpeEncoder {
   public:
    // 2^bucket_bits buckets of words are remembered.
    explicit BpeEncoder(std::shared_ptr<const Model> model, int bucket_bits = 16)
        : model_(std::move(model)), words_(bucket_bits) {}

    // Append the ids of a text.
    void encode(std::string_view text, Ids& out) {
        model_->preparer.prepare(text, prepared_);
        const std::size_t size = prepared_.size();
        prepared_.append(Words::kPadding, '\0');
        const std::string_view all(prepared_.data(), size);
        begin_ = out.room(kMostIdsOfByte * size + Words::kSpare);
        std::int32_t* end = begin_;
        for (std::size_t at = 0; at < size;) {
            std::int32_t id = 0;
            if (const std::size_t length = user_piece(all, at, id); length != 0) {
                *end++ = id;
                at += length;
            } else {
                end = encode_words(all, at, end);
            }
        }
        out.end_at(end);
    }

   private:
    // A blank that is no piece becomes three bytes; another byte gives one id at most.
    static constexpr std::size_t kMostIdsOfByte = 3;
    static constexpr std::size_t kTogether = 16;

    std::size_t user_piece(std::string_view all, std::size_t at, std::int32_t& id) const {
        return model_->user.begins(all[at]) ? model_->user.longest(all.substr(at), id) : 0;
    }

    // A word that is cut off but not encoded yet.
    struct Waiting {
        std::string_view text;
        Words::Key key;
        std::int32_t id;  // of a word that is one character
        bool is_char;
    };

    // Write the ids of the next words, up to kTogether or to a piece of users; where they end. They are looked up
    // together, so that the memory of each is on its way before it is needed.
    std::int32_t* encode_words(std::string_view all, std::size_t& at, std::int32_t* end) {
        std::size_t count = 0;
        for (; count < kTogether && at < all.size(); ++count) {
            std::int32_t id = 0;
            if (count != 0 && user_piece(all, at, id) != 0) break;
            Waiting& word = waiting_[count];
            std::size_t size = 0;
            const std::uint32_t first = first_char(all.substr(at), size);
            const std::size_t stop = end_of_word(all, at + size, first);
            word.text = all.substr(at, stop - at);
            word.is_char = stop == at + size;
            if (word.is_char) {
                word.id = model_->merges.id_of_char(first);
            } else if (word.text.size() <= Words::kLongest) {
                word.key = Words::key_of(word.text);
                words_.prefetch(word.key);
            }
            at = stop;
        }
        for (std::size_t i = 0; i < count; ++i) end = encode_word(waiting_[i], end);
        return end;
    }

    // Where the word ends whose first character `left` ends at `at`.
    std::size_t end_of_word(std::string_view all, std::size_t at, std::uint32_t left) const {
        for (std::size_t size = 0; at < all.size(); at += size) {
            const std::uint32_t right = first_char(all.substr(at), size);
            if (!model_->merges.may_join(left, right)) break;
            std::int32_t id = 0;
            if (user_piece(all, at, id) != 0) break;
            left = right;
        }
        return at;
    }

    // Write the ids of a word; where they end.
    std::int32_t* encode_word(const Waiting& word, std::int32_t* out) {
        std::int32_t* end = out;
        if (word.is_char) {
            end = write(word.id, word.text, out, end);
        } else if (word.text.size() > Words::kLongest) {
            end = encode_new(word.text, out);
        } else {
            end = out + words_.find(word.key, word.text, out);
            if (end == out) {
                end = encode_new(word.text, out);
                words_.insert(word.key, word.text, {out, end});
            }
        }
        // Unknown ids on both sides of a joint become one.
        if (model_->byte_ids.empty() && out != begin_ && out[-1] == model_->unknown_id && out[0] == model_->unknown_id) {
            std::copy(out + 1, end, out);
            --end;
        }
        return end;
    }

    std::int32_t* encode_new(std::string_view word, std::int32_t* const begin) {
        std::int32_t* end = begin;
        model_->merges.encode(word, [&](std::int32_t id, std::size_t start, std::size_t stop) {
            end = write(id, word.substr(start, stop - start), begin, end);
        });
        return end;
    }

    // Write what a symbol becomes, in a word whose ids begin at `begin`; where it ends.
    std::int32_t* write(std::int32_t id, std::string_view symbol, const std::int32_t* begin, std::int32_t* end) const {
        if (id != Merges::kNoPiece) {
            *end++ = id;
        } else if (model_->byte_ids.empty()) {
            if (end == begin || end[-1] != model_->unknown_id) *end++ = model_->unknown_id;
        } else {
            for (const char byte : symbol) end = write_bytes(byte, end);
        }
        return end;
    }

    std::int32_t* write_bytes(char byte, std::int32_t* end) const {
        const std::string_view bytes = byte == ' ' ? kBlank : std::string_view(&byte, 1);
        for (const char one : bytes) *end++ = model_->byte_ids[static_cast<unsigned char>(one)];
        return end;
    }

    std::shared_ptr<const Model> model_;
    Words words_;
    std::string prepared_;
    std::array<Waiting, kTogether> waiting_{};
    std::int32_t* begin_ = nullptr;  // of the ids of the text at hand
};

// Encodes for any number of threads: each call has a BpeEncoder of its own, whose words later calls know.
class Encoder {
   public:
    explicit Encoder(const Facts& facts) : model_(std::make_shared<const Model>(facts)) {}

    // The ids of all texts; `lengths` says how many each has.
    std::vector<std::int32_t> encode(std::span<const std::string_view> texts, std::span<std::int64_t> lengths) const {
        auto worker = workers_.take([this] { return std::make_unique<Worker>(Worker{BpeEncoder(model_), {}}); });
        Ids& ids = worker->ids;
        ids.clear();
        for (std::size_t number = 0; number < texts.size(); ++number) {
            const std::size_t before = ids.size();
            worker->encoder.encode(texts[number], ids);
            lengths[number] = static_cast<std::int64_t>(ids.size() - before);
        }
        std::vector<std::int32_t> result(ids.data(), ids.data() + ids.size());
        workers_.give_back(std::move(worker));
        return result;
    }

   private:
    struct Worker {
        BpeEncoder encoder;
        Ids ids;
    };

    std::shared_ptr<const Model> model_;
    mutable Spares<Worker> workers_;
};

}  // namespace mdata::sp
