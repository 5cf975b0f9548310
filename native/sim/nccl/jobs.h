/* What takes part in a group besides operations: calls that make communicators, and that all ranks have to make. */
#ifndef SIM_NCCL_JOBS_H
#define SIM_NCCL_JOBS_H

#include "comm.h"

struct job {
  enum { JOB_INIT, JOB_SPLIT, JOB_SHRINK, JOB_FINALIZE } kind;
  struct ncclComm *comm, *parent, **out;
  uint64_t magic, hash;
  int rank, ranks; /* to be, except of a split */
  int color, key;
  unsigned ordinal; /* which child of its parent, which split */
  unsigned turn;
  ncclResult_t result;
  pthread_t thread;
  struct job *next;
};

/* init.c */
void sim_job_run(struct job *job);

/* group.c: runs it now, or at the outermost ncclGroupEnd. */
ncclResult_t sim_group_job(const struct job *job);

#endif
