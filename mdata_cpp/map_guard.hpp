// Protection against mapped bytes that the system cannot provide: of a truncated file, or on a failing disk or server.
// The system then sends SIGBUS, which ends the program without naming the file.
//
// Code that copies from maps tells a guard what it reads next. A SIGBUS for exactly these bytes, in the thread that
// reads them, jumps back to where the guard was created; any other is handled as without the guard. Functions in
// between may own nothing. If other code replaces the handler later, as a worker of a torch DataLoader does, the guard
// has no effect. POSIX allows the jump out of a handler (siglongjmp) for a signal raised by the thread's own
// instruction, if that instruction is not inside a function that must not be left.
#pragma once

#include <csetjmp>
#include <csignal>
#include <cstddef>

namespace mdata {

// MapGuard guard;
// if (sigsetjmp(guard.back, 0) != 0) ...  // the bytes that were told last end at guard.stopped()
class MapGuard {
public:
    MapGuard() {
        static const bool installed = install();
        (void)installed;
        current_ = this;
    }
    MapGuard(const MapGuard&) = delete;
    MapGuard& operator=(const MapGuard&) = delete;
    ~MapGuard() { current_ = nullptr; }

    // These bytes are read next, for the caller's item of this number; none: nothing mapped is read.
    void reads(std::size_t item, const std::byte* begin, std::size_t size) {
        item_ = item;
        begin_ = begin;
        end_ = begin + size;
    }

    std::size_t item() const { return item_; }
    const std::byte* stopped() const { return stopped_; }

    sigjmp_buf back;

private:
    static bool install() {
        struct sigaction action {};
        action.sa_sigaction = caught;
        action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;  // it is left by a jump, which unblocks no signal
        ::sigemptyset(&action.sa_mask);
        return ::sigaction(SIGBUS, &action, &before_) == 0;
    }

    static void caught(int signal, siginfo_t* facts, void* context) {
        MapGuard* const guard = current_;
        const auto* const at = static_cast<const std::byte*>(facts->si_addr);
        if (guard != nullptr && facts->si_code > 0 && at >= guard->begin_ && at < guard->end_) {
            guard->stopped_ = at;
            ::siglongjmp(guard->back, 1);
        }
        const bool sent = facts->si_code <= 0;  // by somebody; a fault comes again when we return
        if ((before_.sa_flags & SA_SIGINFO) != 0) return before_.sa_sigaction(signal, facts, context);
        if (before_.sa_handler == SIG_IGN && sent) return;
        if (before_.sa_handler != SIG_DFL && before_.sa_handler != SIG_IGN) return before_.sa_handler(signal);
        ::sigaction(SIGBUS, &before_, nullptr);
        if (sent) ::raise(signal);
    }

    static inline thread_local MapGuard* volatile current_ = nullptr;
    static inline struct sigaction before_ {};

    // Volatile, as they are read behind a jump.
    volatile std::size_t item_ = 0;
    const std::byte* volatile begin_ = nullptr;
    const std::byte* volatile end_ = nullptr;
    const std::byte* volatile stopped_ = nullptr;
};

}  // namespace mdata
