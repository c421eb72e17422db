// What GCC's static C++ library and our sources ask of a newer glibc than the one that LONGSPAN_GLIBC_STUBS names.
// Linked only then, and visible only inside the module or command that links it.
#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <ctime>

#pragma GCC visibility push(hidden)
extern "C" {

// glibc 2.32. False: reference counts stay atomic.
char __libc_single_threaded = 0;

// glibc 2.25.
int getentropy(void* buffer, std::size_t bytes) {
  if (syscall(SYS_getrandom, buffer, bytes, 0) == static_cast<long>(bytes)) return 0;
  const int file = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
  const bool filled = file >= 0 && read(file, buffer, bytes) == static_cast<ssize_t>(bytes);
  if (file >= 0) close(file);
  return filled ? 0 : -1;
}

// glibc 2.36.
std::uint32_t arc4random() noexcept {
  std::uint32_t number = 0;
  if (getentropy(&number, sizeof(number)) != 0) std::abort();  // as glibc's own does
  return number;
}

// glibc 2.30. What is left of the deadline, on the clock that pthread_cond_timedwait reads. A clock that is set in
// between ends the wait early or late; callers look at their own clock again.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* deadline) {
  constexpr long kSecond = 1'000'000'000;
  timespec now{}, until{};
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += deadline->tv_sec - now.tv_sec;
  until.tv_nsec += deadline->tv_nsec - now.tv_nsec;
  if (until.tv_nsec < 0) until.tv_nsec += kSecond, --until.tv_sec;
  if (until.tv_nsec >= kSecond) until.tv_nsec -= kSecond, ++until.tv_sec;
  return pthread_cond_timedwait(condition, mutex, &until);
}

}  // extern "C"
#pragma GCC visibility pop
