// A text of zeros whose pages take no memory before they are written, for places past 32 bits.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <string_view>
#include <system_error>

namespace check {

class FarText {
public:
    // `end` behind `zeros` bytes of value 0.
    FarText(std::size_t zeros, std::string_view end) : size_(zeros + end.size()) {
        void* const at = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category());
        bytes_ = static_cast<char*>(at);
        end.copy(bytes_ + zeros, end.size());
    }
    FarText(const FarText&) = delete;
    FarText& operator=(const FarText&) = delete;
    ~FarText() { ::munmap(bytes_, size_); }

    std::string_view view() const { return {bytes_, size_}; }

private:
    std::size_t size_;
    char* bytes_ = nullptr;
};

}  // namespace check
