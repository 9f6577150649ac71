// Whole samples of BERT and T5 from the sentences of a row, equal to those of Megatron's datasets or with two changes.
//
// In Megatron's form (`by_value`) padding is recognized by its value, as in Megatron: every token equal to it becomes 0
// at the end, labels too, and BERT's types and padding mask are filled with it. In the other form padding is known by
// position only, and T5's spans are limited to what fits the decoder and the sentinels. Fields are rows of int64, which
// are fully written.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "masking.hpp"

namespace mdata {

// The sentences of a row, one after another, and how many tokens of them are wanted.
struct SampleText {
    std::span<const std::int32_t> sizes;
    std::span<const std::int64_t> tokens;
    std::int64_t target;
};

using Field = std::span<std::int64_t>;

struct Padding {
    std::int64_t pad;
    bool by_value;

    // `with` behind the first `used` cells.
    void fill(Field cells, std::size_t used, std::int64_t with) const {
        std::fill(cells.begin() + static_cast<std::ptrdiff_t>(used), cells.end(), with);
    }
    // 1 where there is text, else `otherwise`; to be asked before `clean`.
    void mark(Field text, std::size_t used, Field marks, std::int64_t otherwise) const {
        for (std::size_t i = 0; i < text.size(); ++i) {
            const bool is_pad = by_value ? text[i] == pad : i >= used;
            marks[i] = is_pad ? otherwise : 1;
        }
    }
    // What a model can look up in its table.
    void clean(Field cells) const {
        if (by_value) std::replace(cells.begin(), cells.end(), pad, std::int64_t{0});
    }
};

inline std::size_t as_size(std::int64_t value) { return static_cast<std::size_t>(value); }

struct BertForm {
    std::int64_t length;  // of a sample, special tokens included
    bool head;            // whether it asks which of two texts follows the other
    Padding padding;
};

struct BertFields {
    Field text, types, labels, padding_mask, loss_mask;
    std::int64_t* is_random;
    std::int64_t* truncated;
};

class BertSampler {
public:
    BertSampler(const BertForm& form, const MaskVocabulary& vocabulary, const MaskRule& rule)
        : form_(form), vocabulary_(vocabulary), masking_(vocabulary, rule) {}

    template <typename Generator>
    void sample(const SampleText& row, Generator& generator, const BertFields& out) {
        if (row.target < 0 || row.target > form_.length - 3) throw std::invalid_argument("a target that has no room");
        if (form_.head && row.sizes.size() < 2) throw std::invalid_argument("a pair of texts needs two sentences");
        *out.is_random = choose_parts(row, generator) ? 1 : 0;
        *out.truncated = trim(row.target, generator) ? 1 : 0;
        join();
        masking_.run(ids_, row.target, {}, generator, [this](Generator& g, std::int64_t id) {
            if (g.real() < 0.8) return vocabulary_.mask;
            if (g.real() < 0.5) return id;
            return vocabulary_.ids[as_size(g.integer(0, static_cast<std::int64_t>(vocabulary_.ids.size())))];
        });
        write(out);
    }

private:
    using Part = std::span<const std::int64_t>;

    // The two texts; whether they stand in the wrong order.
    template <typename Generator>
    bool choose_parts(const SampleText& row, Generator& generator) {
        const auto count = static_cast<std::int64_t>(row.sizes.size());
        std::int64_t pivot = count;
        bool is_random = false;
        if (form_.head) {
            pivot = count >= 3 ? generator.integer(1, count) : 1;
            is_random = generator.real() < 0.5;
        }
        std::size_t before = 0;
        for (std::int64_t i = 0; i < pivot; ++i) before += as_size(row.sizes[as_size(i)]);
        first_ = row.tokens.first(before);
        second_ = row.tokens.subspan(before);
        if (is_random) std::swap(first_, second_);
        return is_random;
    }

    // Token by token from either end of the longer text, until both fit.
    template <typename Generator>
    bool trim(std::int64_t target, Generator& generator) {
        bool truncated = false;
        while (first_.size() + second_.size() > as_size(target)) {
            Part& part = first_.size() > second_.size() ? first_ : second_;
            part = generator.real() < 0.5 ? part.subspan(1) : part.first(part.size() - 1);
            truncated = true;
        }
        return truncated;
    }

    void join() {
        ids_.assign(1, vocabulary_.cls);
        ids_.insert(ids_.end(), first_.begin(), first_.end());
        ids_.push_back(vocabulary_.sep);
        if (second_.empty()) return;
        ids_.insert(ids_.end(), second_.begin(), second_.end());
        ids_.push_back(vocabulary_.sep);
    }

    void write(const BertFields& out) const {
        const Padding& padding = form_.padding;
        const std::size_t used = ids_.size();
        const std::size_t own = first_.size() + 2;
        std::copy(masking_.masked().begin(), masking_.masked().end(), out.text.begin());
        padding.fill(out.text, used, padding.pad);
        std::fill(out.types.begin(), out.types.begin() + static_cast<std::ptrdiff_t>(own), 0);
        std::fill(out.types.begin() + static_cast<std::ptrdiff_t>(own), out.types.begin() + static_cast<std::ptrdiff_t>(used), 1);
        padding.fill(out.types, used, padding.by_value ? padding.pad : 0);
        padding.mark(out.text, used, out.padding_mask, padding.by_value ? padding.pad : 0);
        std::fill(out.labels.begin(), out.labels.end(), -1);
        std::fill(out.loss_mask.begin(), out.loss_mask.end(), 0);
        const auto ask = [&](std::span<const std::int32_t> places) {
            for (const std::int32_t place : places) {
                out.labels[as_size(place)] = ids_[as_size(place)];
                out.loss_mask[as_size(place)] = 1;
            }
        };
        masking_.each_span(ask);
        ask(masking_.exchanged());
        padding.clean(out.text);
        padding.clean(out.labels);
    }

    BertForm form_;
    const MaskVocabulary& vocabulary_;
    Masking masking_;
    Part first_, second_;
    std::vector<std::int64_t> ids_;
};

struct T5Form {
    std::int64_t encoder_length;
    std::int64_t decoder_length;
    std::int64_t bos;
    std::int64_t eos;
    std::vector<std::int64_t> sentinels;
    Padding padding;
};

struct T5Fields {
    Field text_enc, text_dec, labels, loss_mask, enc_mask, dec_mask;
    std::int64_t* truncated;
};

class T5Sampler {
public:
    T5Sampler(const T5Form& form, const MaskVocabulary& vocabulary, const MaskRule& rule)
        : form_(form), vocabulary_(vocabulary), masking_(vocabulary, rule) {}

    // False if there are more spans than sentinels, or more tokens than the decoder has cells: see `spans`, `cells`.
    template <typename Generator>
    bool sample(const SampleText& row, Generator& generator, const T5Fields& out) {
        if (row.target < 0 || row.target > form_.encoder_length - 2) throw std::invalid_argument("a target that has no room");
        const std::size_t kept = std::min(row.tokens.size(), as_size(row.target));
        const auto ids = row.tokens.first(kept);
        *out.truncated = kept < row.tokens.size() ? 1 : 0;
        Room room;
        // One cell of the decoder is the first token's.
        if (!form_.padding.by_value) room = {static_cast<std::int64_t>(form_.sentinels.size()), form_.decoder_length - 1};
        masking_.run(ids, row.target, room, generator, [this](Generator&, std::int64_t) { return vocabulary_.mask; });
        assemble(ids);
        if (spans() > form_.sentinels.size() || cells() > out.text_dec.size()) return false;
        write(out);
        return true;
    }

    std::size_t spans() const { return as_size(masking_.num_spans()); }
    std::size_t cells() const { return decoder_.size(); }

private:
    void assemble(std::span<const std::int64_t> ids) {
        encoder_.clear();
        decoder_.assign(1, form_.bos);
        std::size_t done = 0, number = 0;
        masking_.each_span([&](std::span<const std::int32_t> places) {
            const std::int64_t sentinel = number < form_.sentinels.size() ? form_.sentinels[number] : 0;
            number += 1;
            encoder_.insert(encoder_.end(), ids.begin() + static_cast<std::ptrdiff_t>(done), ids.begin() + places.front());
            encoder_.push_back(sentinel);
            decoder_.push_back(sentinel);
            for (const std::int32_t place : places) decoder_.push_back(ids[as_size(place)]);
            done = as_size(places.back()) + 1;
        });
        encoder_.insert(encoder_.end(), ids.begin() + static_cast<std::ptrdiff_t>(done), ids.end());
    }

    void write(const T5Fields& out) const {
        const Padding& padding = form_.padding;
        std::copy(encoder_.begin(), encoder_.end(), out.text_enc.begin());
        std::copy(decoder_.begin(), decoder_.end(), out.text_dec.begin());
        padding.fill(out.text_enc, encoder_.size(), padding.pad);
        padding.fill(out.text_dec, decoder_.size(), padding.pad);
        padding.mark(out.text_enc, encoder_.size(), out.enc_mask, 0);
        padding.mark(out.text_dec, decoder_.size(), out.dec_mask, 0);
        // Labels are the decoder's input, one place on.
        std::fill(out.labels.begin(), out.labels.end(), -1);
        std::copy(decoder_.begin() + 1, decoder_.end(), out.labels.begin());
        out.labels[decoder_.size() - 1] = form_.eos;
        for (std::size_t i = 0; i < out.loss_mask.size(); ++i) out.loss_mask[i] = i < decoder_.size() ? 1 : 0;
        padding.clean(out.text_enc);
        padding.clean(out.text_dec);
        padding.clean(out.labels);
    }

    T5Form form_;
    const MaskVocabulary& vocabulary_;
    Masking masking_;
    std::vector<std::int64_t> encoder_, decoder_;
};

}  // namespace mdata
