/* SPDX-License-Identifier: Apache-2.0
 * Two events for bench/lttngcall.c: entry and exit of a call, with two words. */
#undef LTTNG_UST_TRACEPOINT_PROVIDER
#define LTTNG_UST_TRACEPOINT_PROVIDER stallscope_bench
#undef LTTNG_UST_TRACEPOINT_INCLUDE
#define LTTNG_UST_TRACEPOINT_INCLUDE "lttng_events.h"
#if !defined(LTTNG_EVENTS_H) || defined(LTTNG_UST_TRACEPOINT_HEADER_MULTI_READ)
#define LTTNG_EVENTS_H
#include <lttng/tracepoint.h>
LTTNG_UST_TRACEPOINT_EVENT(stallscope_bench, enter, LTTNG_UST_TP_ARGS(unsigned long, func, unsigned long, stream),
                           LTTNG_UST_TP_FIELDS(lttng_ust_field_integer(unsigned long, func, func)
                                                   lttng_ust_field_integer(unsigned long, stream, stream)))
LTTNG_UST_TRACEPOINT_EVENT(stallscope_bench, leave, LTTNG_UST_TP_ARGS(int, result),
                           LTTNG_UST_TP_FIELDS(lttng_ust_field_integer(int, result, result)))
#endif
#include <lttng/tracepoint-event.h>
