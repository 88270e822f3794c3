#include "input.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "errors.h"

namespace serve {
namespace {

int stop_pipe[2] = {-1, -1};  // readable once a signal has come

void on_signal(int) {
  const int before = errno;
  [[maybe_unused]] const ssize_t written = ::write(stop_pipe[1], "", 1);
  errno = before;
}

}  // namespace

void check_standard_streams() {
  for (int stream = 0; stream <= 2; ++stream) {
    if (::fcntl(stream, F_GETFD) < 0) {  // the lowest free number is given to the next file; writing to 1 then fails
      ::open("/dev/null", stream == 2 ? O_WRONLY : O_RDONLY);
    }
  }
}

void stop_reading_at_signals() {
  if (::pipe2(stop_pipe, O_CLOEXEC | O_NONBLOCK) != 0) {
    throw FileError(std::string("a pipe cannot be made: ") + std::strerror(errno) + " [no_file]");
  }
  struct sigaction action{};
  action.sa_handler = on_signal;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  ::sigaction(SIGTERM, &action, nullptr);
  ::sigaction(SIGINT, &action, nullptr);
}

Input::Input(const std::string& path) : path_(path == "-" ? "standard input" : path) {
  if (path != "-") {
    descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  }
  if (descriptor_ < 0) {
    fail();
  }
}

Input::~Input() {
  if (descriptor_ > 0) {
    ::close(descriptor_);
  }
}

void Input::fail() const { throw FileError(path_ + " cannot be read: " + std::strerror(errno) + " [no_file]"); }

Input::int_type Input::underflow() {
  pollfd either[] = {{descriptor_, POLLIN, 0}, {stop_pipe[0], POLLIN, 0}};  // poll ignores -1
  while (::poll(either, 2, -1) < 0) {
    if (errno != EINTR) {
      fail();
    }
  }
  if (either[1].revents != 0) {
    return traits_type::eof();
  }
  ssize_t got = 0;
  do {
    got = ::read(descriptor_, buffer_.data(), buffer_.size());
  } while (got < 0 && errno == EINTR);
  if (got < 0) {
    fail();
  }
  if (got == 0) {
    return traits_type::eof();
  }
  setg(buffer_.data(), buffer_.data(), buffer_.data() + got);
  return traits_type::to_int_type(buffer_.front());
}

}  // namespace serve
