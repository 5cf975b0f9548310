// throwing MODE [ROUNDS]: C++ exceptions and destructors around hooked calls and in host functions.
//
// Prints "ready", waits for a line, and ends with one line that is the same whether it is traced or not. Modes:
//   around   thrown and caught above, below and between hooked calls
//   inside   thrown and caught in host functions and in a handler that interrupts a wait
//   cancel   a thread is cancelled in a wait: which destructors run (docs/limits.md: none under return probes)
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#define _Static_assert static_assert  // the header is C11
extern "C" {
#include "sim_cudart.h"
}

namespace {

unsigned long rounds = 300;
cudaStream_t stream;
std::atomic<unsigned long> caught{0}, destroyed{0}, handled{0};
std::atomic<bool> over{false}, waiting{false};

void kernel_stub() {}

struct Guard {
  ~Guard() { destroyed++; }
};

void must(bool fine, const char *what) {
  if (fine) return;
  std::fprintf(stderr, "throwing: %s\n", what);
  _exit(3);
}

void launch(cudaStream_t where, unsigned long long ns) {
  dim3 one = {1, 1, 1};
  stallscope_sim_set_next_kernel_ns(ns);
  must(cudaLaunchKernel(reinterpret_cast<void *>(kernel_stub), one, one, nullptr, 0, where) == 0, "launch");
}

void wait_for(cudaStream_t where) { must(cudaStreamSynchronize(where) == 0, "synchronize"); }

void ready() {
  char line[64];
  std::puts("ready");
  std::fflush(stdout);
  if (!std::fgets(line, sizeof line, stdin)) std::exit(0);
}

__attribute__((noinline)) void dig(int depth) {
  Guard guard;
  launch(stream, 1);
  wait_for(stream);
  if (!depth) throw std::runtime_error("at the bottom");
  dig(depth - 1);
}

void throw_and_catch() {
  try {
    Guard guard;
    throw std::logic_error("inside");
  } catch (const std::logic_error &) {
    caught++;
  }
}

void host_function(void *) { throw_and_catch(); }

void on_signal(int) {
  throw_and_catch();
  handled++;
}

void mode_around() {
  ready();
  for (unsigned long i = 0; i < rounds; i++) {
    try {
      dig(8);
    } catch (const std::runtime_error &) {
      caught++;
    }
    wait_for(stream);
  }
  std::printf("around: %lu caught, %lu destroyed\n", caught.load(), destroyed.load());
}

void *wait_often(void *) {
  cudaStream_t own;
  must(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking) == 0, "stream");
  for (unsigned long i = 0; i < rounds; i++) {
    launch(own, 1000000);
    must(cudaLaunchHostFunc(own, host_function, nullptr) == 0, "host function");
    wait_for(own);
  }
  over = true;
  return nullptr;
}

void mode_inside() {
  pthread_t thread;
  struct sigaction action = {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigaction(SIGUSR1, &action, nullptr);
  ready();
  must(pthread_create(&thread, nullptr, wait_often, nullptr) == 0, "thread");
  while (!over) {
    pthread_kill(thread, SIGUSR1);
    usleep(700);
  }
  pthread_join(thread, nullptr);
  bool all = caught == rounds + handled && destroyed == caught;
  std::printf("inside: %s, handler ran: %s\n", all ? "all caught" : "some lost", handled ? "yes" : "no");
}

void *wait_forever(void *) {
  Guard guard;
  cudaStream_t own;
  must(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking) == 0, "stream");
  launch(own, 600000000000ull);
  waiting = true;
  wait_for(own);
  return nullptr;
}

void mode_cancel() {
  unsigned long cancelled = 0;
  ready();
  for (unsigned long i = 0; i < rounds / 10; i++) {
    pthread_t thread;
    void *result;
    waiting = false;
    must(pthread_create(&thread, nullptr, wait_forever, nullptr) == 0, "thread");
    while (!waiting) usleep(1000);
    usleep(5000);
    pthread_cancel(thread);
    pthread_join(thread, &result);
    cancelled += result == PTHREAD_CANCELED;
  }
  std::printf("cancel: %lu cancelled\ndestroyed: %lu\n", cancelled, destroyed.load());
}

}  // namespace

int main(int argc, char **argv) {
  const struct {
    const char *name;
    void (*run)();
  } modes[] = {{"around", mode_around}, {"inside", mode_inside}, {"cancel", mode_cancel}};
  if (argc > 2) rounds = std::strtoul(argv[2], nullptr, 10);
  setenv("STALLSCOPE_SIM_KERNEL_NS", "1", 0);
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == 0, "stream");
  for (const auto &mode : modes) {
    if (argc < 2 || std::strcmp(mode.name, argv[1]) != 0) continue;
    mode.run();
    std::fflush(stdout);
    return 7;
  }
  return 2;
}
