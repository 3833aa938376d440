// The C interface of the optimizer service: one shared library, libmuond_client.so, for every
// language that can call C. A trainer joins a run, sends gradients, gets parameters back; the
// service is a daemon, or lives in this process (muond_service_start).
//
// Conventions
//
//  1. Handles (muond_session, muond_service, muond_text, muond_error) are opaque. What a function
//     gives through a `**` argument belongs to the caller, who frees it with the handle's own
//     _free. Freeing NULL does nothing. On failure the handle is set to NULL.
//  2. Functions that can fail return a code, MUOND_OK or one of enum muond_code, and take as their
//     last argument `muond_error** error`, which may be NULL. On failure *error is a new error with
//     code and message, on success NULL. Codes are those of docs/errors.md.
//  3. No exception crosses this interface, and nothing here ends the process.
//  4. Text is UTF-8 with its length beside it and need not end in a zero byte. A NULL pointer is an
//     empty text. Texts handed out do end in a zero byte, which the length does not count.
//  5. Descriptions of runs, and reports, are protobuf's JSON of the messages in proto/muond/v1:
//     `{"name": "gpt", "worldSize": 1, ...}`. Field names as in the .proto are taken, too. Unknown
//     fields are an error. 64-bit integers come back as strings, as protobuf's JSON has them.
//  6. Structures that start with `struct_bytes` grow at their end: set it to sizeof the structure
//     that the caller was compiled with; what lies beyond is taken as zero. Others never change.
//     A reserved field must be zero.
//  7. Memory that a caller names is read, or written, during the call only, never afterwards.
//     Elements are little endian and row-major; counts are in elements, not in bytes, unless a name
//     says bytes. Buffers need no alignment beyond that of their element type.
//  8. Times are seconds as doubles; 0 means the default that is named. Every call ends within its
//     time: a daemon that has died is MUOND_UNAVAILABLE or MUOND_DEADLINE_EXCEEDED, never a hang.
//  9. Threads: calls on one session wait for each other; sessions are independent. A session must
//     not be freed while a call on it runs. Free a service after the sessions that use it.
// 10. fork: a child must not touch handles that its parent made, not even to free them.
// 11. The library exports these functions and nothing else, at version node MUOND_1. A caller
//     checks muond_abi_version() == MUOND_ABI_VERSION; functions are added without raising it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MUOND_ABI_VERSION 1u

enum muond_code {
  MUOND_OK = 0,
  MUOND_CANCELLED = 1,
  MUOND_UNKNOWN = 2,
  MUOND_INVALID_ARGUMENT = 3,
  MUOND_DEADLINE_EXCEEDED = 4,
  MUOND_NOT_FOUND = 5,
  MUOND_ALREADY_EXISTS = 6,
  MUOND_PERMISSION_DENIED = 7,
  MUOND_RESOURCE_EXHAUSTED = 8,
  MUOND_FAILED_PRECONDITION = 9,
  MUOND_ABORTED = 10,
  MUOND_OUT_OF_RANGE = 11,
  MUOND_UNIMPLEMENTED = 12,
  MUOND_INTERNAL = 13,
  MUOND_UNAVAILABLE = 14,
  MUOND_DATA_LOSS = 15
};

enum muond_dtype { MUOND_F32 = 1, MUOND_BF16 = 2, MUOND_F16 = 3 };

// Where a buffer lies: host memory, or that of a CUDA device, by pointer. Where the path to the
// daemon takes device memory (muond_session_transports), nothing goes through the host.
enum muond_memory { MUOND_HOST = 0, MUOND_CUDA = 1 };

// As in the messages.
enum muond_run_state {
  MUOND_RUN_UNSPECIFIED = 0,
  MUOND_RUN_OPENING = 1,        // ranks or initial values are missing
  MUOND_RUN_RUNNING = 2,
  MUOND_RUN_DRAINING = 3,
  MUOND_RUN_FAILED = 4,
  MUOND_RUN_NEEDS_RESTORE = 5   // a daemon lost its state
};
enum muond_skip_cause {
  MUOND_APPLIED = 0,
  MUOND_SKIP_OVERFLOW = 1,        // a non-finite gradient element
  MUOND_SKIP_STATE_OVERFLOW = 2,  // finite, but the new state could not be
  MUOND_SKIP_NORM_THRESHOLD = 3,
  MUOND_SKIP_TRAINER = 4          // the trainer said so
};

typedef struct muond_error muond_error;
typedef struct muond_text muond_text;
typedef struct muond_service muond_service;
typedef struct muond_session muond_session;

// ---- Library, errors, texts ---------------------------------------------------------------------

uint32_t muond_abi_version(void);
// "0.1.0"; lives as long as the library.
const char* muond_version(void);
// 1 when muond_service_start can work: the library was built with the service in it.
int32_t muond_has_service(void);

int32_t muond_error_code(const muond_error* error);
// Object, action, cause: `parameter "blk.3.wq": push for step 41: expected ...`. Lives as long as
// the error. `bytes` may be NULL.
const char* muond_error_message(const muond_error* error, size_t* bytes);
void muond_error_free(muond_error* error);

const char* muond_text_data(const muond_text* text, size_t* bytes);
void muond_text_free(muond_text* text);

// ---- The service in this process ----------------------------------------------------------------

typedef struct muond_service_options {
  size_t struct_bytes;
  const char* backend;  // "cpu" (default), "cuda", "auto" or "reference"
  size_t backend_bytes;
  // An address where others may join, "unix:///path" or "127.0.0.1:0"; empty: none, sessions of
  // this process only.
  const char* listen;
  size_t listen_bytes;
  const char* log_level;  // "debug", "info", "warn" (default), "error" or "off"; to stderr
  size_t log_level_bytes;
  int64_t threads;  // of the backend; 0: one per core
  const char* checkpoint_dir;  // an existing directory; empty: no checkpoints
  size_t checkpoint_dir_bytes;
  int64_t checkpoint_every_steps;  // 0: only when asked for
} muond_service_options;

// INVALID_ARGUMENT for options that make no sense, UNAVAILABLE when the address can't be bound,
// UNIMPLEMENTED when the library was built without the service.
int32_t muond_service_start(const muond_service_options* options, muond_service** service,
                            muond_error** error);
// What was bound, port resolved; empty when nothing was asked for. Lives as long as the service.
const char* muond_service_address(const muond_service* service, size_t* bytes);
// Stops it; what it holds is gone.
void muond_service_free(muond_service* service);

// ---- Joining and leaving a run ------------------------------------------------------------------

typedef struct muond_session_options {
  size_t struct_bytes;
  // "unix:///run/muond/muond.sock" or "127.0.0.1:7070"; empty: $MUOND_ENDPOINT. Any daemon of the
  // run: it names the others.
  const char* endpoint;
  size_t endpoint_bytes;
  muond_service* service;  // takes the place of the endpoint
  double call_timeout;     // of a control call, repeats included; default 30
  double step_timeout;     // of a Finish, which waits for the other ranks; default 120
  double bulk_timeout;     // of one stream of slices; default 300
  int64_t chunk_bytes;     // payload of one message; default 1 MiB
  // How slices travel: "auto" (default) takes the best path that the daemon offers; a path that is
  // named is taken or refused (docs/data-paths.md).
  const char* transport;
  size_t transport_bytes;
  // Where gradients and parameters lie: enum muond_memory, and of MUOND_CUDA the device, whose
  // memory a daemon on it then shares. Slices may say otherwise.
  int32_t memory;
  int32_t device;          // CUDA's ordinal in this process
  int32_t gradient_dtype;  // the widest of the gradients, enum muond_dtype; 0: each parameter's own
  int32_t reserved;
  // How long a step, a skip or a pull waits for daemons that restart and runs that are restored;
  // default 300. Negative: what interrupts it is returned at once, for a caller that sees to that
  // itself, with muond_session_await_restore.
  double recovery_timeout;
} muond_session_options;

// Joins a run, or rejoins it under the same session name. `registration` is the JSON of a
// RegisterRequest: run, rank, session, slices; shapes are the layers' logical ones, slices the
// boxes that this rank holds.
// INVALID_ARGUMENT and FAILED_PRECONDITION name the parameters and the remedy (Muon that would be
// inactive, placeholder shapes, gaps); ALREADY_EXISTS: another session holds the rank;
// FAILED_PRECONDITION also when the daemon is of another version; UNAVAILABLE when none answers
// within call_timeout.
int32_t muond_session_open(const muond_session_options* options, const char* registration,
                           size_t registration_bytes, muond_session** session,
                           muond_error** error);
// Forgets the session without a word to the daemons: the run goes on without this process.
void muond_session_free(muond_session* session);

// Leaves the run; the last rank's close frees it. *closed: the run is gone.
int32_t muond_session_close(muond_session* session, int32_t* closed, muond_error** error);

typedef struct muond_position {
  size_t struct_bytes;
  int64_t generation;
  int64_t next_step;         // that begin will name
  double loss_scale;         // that its gradients must be made with
  int32_t state;             // enum muond_run_state, when the session last registered
  int32_t daemons;           // that the run spans
  int64_t last_step;         // the newest step whose end is known; -1: none
  int32_t last_applied;
  int32_t last_cause;        // enum muond_skip_cause
} muond_position;

// Where the run stands, as far as this session knows; no call is made.
int32_t muond_session_position(muond_session* session, muond_position* position,
                               muond_error** error);

// JSON of the RegisterReply: who got which algorithm and why, owners, data path.
int32_t muond_session_describe(muond_session* session, muond_text** json, muond_error** error);
// JSON list of the data path to each daemon, and why it is no other: {"daemon", "name", "reason"}.
int32_t muond_session_transports(muond_session* session, muond_text** json, muond_error** error);
// JSON of a StatusReply with this run, from the daemon that the session first contacted.
int32_t muond_session_status(muond_session* session, muond_text** json, muond_error** error);
// JSON of a DigestReply of this run.
int32_t muond_session_digest(muond_session* session, muond_text** json, muond_error** error);

// Adds parameters, and groups for them, to the run: between two steps, by all ranks, each with the
// slices that it holds. `addition` is the JSON of an AddParametersRequest with `groups`,
// `parameters` and `slices`; its other fields are the session's to fill in. Returns when they are
// the run's on all daemons, behind the others in muond_session_describe; then
// muond_session_initialize gives them their values, without which no step can be taken. What was
// there keeps its values and its state. May be repeated after an error, also by a trainer that has
// restarted and joined with the parameters of before; the run changes on all daemons or on none.
// INVALID_ARGUMENT as of muond_session_open, or when ranks disagree; ALREADY_EXISTS: the run has a
// parameter of that name; DEADLINE_EXCEEDED that names the ranks that did not ask within
// step_timeout; UNIMPLEMENTED: a daemon is older than this interface.
int32_t muond_session_add_parameters(muond_session* session, const char* addition,
                                     size_t addition_bytes, muond_error** error);

// Registers again and adopts generation, next step, loss scale and last outcome.
int32_t muond_session_rejoin(muond_session* session, muond_error** error);
// Starts the step in flight over, for all ranks, whose calls get ABORTED.
int32_t muond_session_raise_generation(muond_session* session, const char* reason,
                                       size_t reason_bytes, muond_error** error);

// ---- Checkpoints --------------------------------------------------------------------------------

// Saves the run on all of its daemons, as it is or after the step in flight, and returns once the
// checkpoint is durable, within bulk_timeout. *json: a SaveReply, with the checkpoint's name and
// the step that a run restored from it goes on with. FAILED_PRECONDITION where the daemons have no
// checkpoint directory, or the run has no state yet.
int32_t muond_session_save(muond_session* session, muond_text** json, muond_error** error);
// Takes the run back to a checkpoint, "ckpt-1200", or to the newest that can be read where the name
// is empty, for all ranks, whose calls are refused until they rejoin; this session has rejoined.
// `allow_relayout`: matrices may be seen otherwise than when it was saved. *json: a RestoreReply.
// On an error nothing has changed.
int32_t muond_session_restore(muond_session* session, const char* name, size_t name_bytes,
                              int32_t allow_relayout, muond_text** json, muond_error** error);
// Rejoins until no daemon of the run lacks its state any more: what to do when a call ends with
// NOT_FOUND or UNAVAILABLE because a daemon went away, or says that the run needs a restore, and
// after joining a run in state MUOND_RUN_NEEDS_RESTORE. Then muond_session_position tells where to
// go on: at the same step, or at an earlier one, whose version is to be pulled. State
// MUOND_RUN_OPENING: the state is gone for good, and no checkpoint was there; or, where parameters
// were added to the run, values of those are missing and the rest is still there. UNAVAILABLE or
// DEADLINE_EXCEEDED when `timeout` seconds were not enough.
int32_t muond_session_await_restore(muond_session* session, double timeout, muond_error** error);

// ---- Values in and out --------------------------------------------------------------------------

// One slice to send: `elements` values of `dtype`, the row-major order of its box.
typedef struct muond_source {
  const char* parameter;
  size_t parameter_bytes;
  const void* data;
  void* stream;          // of MUOND_CUDA: what is queued there before the call makes the values
  int64_t elements;
  int64_t slice;         // index of the box in the registration
  int64_t micro_batch;   // 0 where there is one
  int32_t dtype;         // enum muond_dtype
  int32_t memory;        // enum muond_memory
  int32_t device;        // of MUOND_CUDA: the ordinal in this process
  int32_t reserved;
} muond_source;

// Where one slice goes. `dtype` is the parameter's, or MUOND_F32 where masters are pulled. Of
// MUOND_CUDA: the values are there for what is queued on `stream` after the call.
typedef struct muond_sink {
  const char* parameter;
  size_t parameter_bytes;
  void* data;
  void* stream;
  int64_t elements;
  int64_t slice;
  int32_t dtype;
  int32_t memory;
  int32_t device;
  int32_t reserved;
} muond_sink;

// Starting values, all of this rank's slices. *complete: the run has all ranks' now.
int32_t muond_session_initialize(muond_session* session, const muond_source* values, size_t count,
                                 int32_t* complete, muond_error** error);
// Forgets momentum, moments and t, and goes on at the next step from these values: for a run that
// lost its state. All ranks call it.
int32_t muond_session_reinitialize(muond_session* session, const muond_source* values, size_t count,
                                   const char* reason, size_t reason_bytes, int32_t* complete,
                                   muond_error** error);
// Parameters of `version` (muond_outcome's, 0 before the first step): whole or not at all;
// FAILED_PRECONDITION for any other version. On failure the sinks' contents are undefined.
int32_t muond_session_pull(muond_session* session, int64_t version, const muond_sink* sinks,
                           size_t count, int32_t masters, muond_error** error);

// ---- Steps --------------------------------------------------------------------------------------

typedef struct muond_begin {
  size_t struct_bytes;
  int64_t step;           // -1: the session's next
  double loss_scale;      // that the gradients are made with; 0: the session's
  int64_t micro_batches;  // 0: 1
  // JSON of a BeginRequest's `muon` and `adamw`: {"muon": {"group": {"lr": 0.02, ...}}}. A group
  // that is missing keeps its values.
  const char* hyperparameters;
  size_t hyperparameters_bytes;
} muond_begin;

// What became of a step. A skip is an outcome, not an error.
typedef struct muond_outcome {
  size_t struct_bytes;
  int64_t step;
  int64_t version;          // steps consumed so far; names what to pull
  int64_t applied_steps;    // of the run
  int64_t skipped_steps;
  int64_t consecutive_skips;
  int64_t newton_schulz_calls;
  int64_t newton_schulz_fallbacks;
  int64_t zero_inputs;
  int64_t nonfinite_elements;
  double loss_scale;        // that the gradients were made with
  double next_loss_scale;
  double grad_norm;         // unscaled, before clipping
  double clip_coefficient;
  int32_t applied;
  int32_t cause;            // enum muond_skip_cause
} muond_outcome;

// Parameter names to be left alone in a step: `names[i]` has `bytes[i]` bytes.
typedef struct muond_names {
  const char* const* names;
  const size_t* bytes;
  size_t count;
} muond_names;

// Begin, push, finish; starts over by itself when the attempt was discarded. `absent` may be NULL.
int32_t muond_session_step(muond_session* session, const muond_begin* begin,
                           const muond_source* gradients, size_t count, const muond_names* absent,
                           muond_outcome* outcome, muond_error** error);

// The same, and a pull of the version that it leads to: in one call to the daemon where all of it
// lies in memory that one daemon reaches. An error may be the pull's: then the step is taken all
// the same, and muond_session_position tells so (last_step).
int32_t muond_session_step_and_pull(muond_session* session, const muond_begin* begin,
                                    const muond_source* gradients, size_t count,
                                    const muond_names* absent, const muond_sink* sinks,
                                    size_t sink_count, muond_outcome* outcome,
                                    muond_error** error);

// The same in pieces. ABORTED: rejoin, then start the step again from begin. A slice that is pushed
// again must have the same bytes: ALREADY_EXISTS otherwise; raise the generation to start over.
int32_t muond_session_begin(muond_session* session, const muond_begin* begin, muond_error** error);
int32_t muond_session_push(muond_session* session, const muond_source* gradients, size_t count,
                           muond_error** error);
int32_t muond_session_finish(muond_session* session, const muond_names* absent,
                             muond_outcome* outcome, muond_error** error);
// Likewise with the pull, as muond_session_step_and_pull.
int32_t muond_session_finish_and_pull(muond_session* session, const muond_names* absent,
                                      const muond_sink* sinks, size_t sink_count,
                                      muond_outcome* outcome, muond_error** error);
// Discards the next step on the trainer's word; all ranks do. `cause`: enum muond_skip_cause.
int32_t muond_session_skip(muond_session* session, int32_t cause, double loss_scale,
                           muond_outcome* outcome, muond_error** error);

// JSON of the StepOutcome, names of the parameters with non-finite gradients included, of the
// newest step that this session knows; NOT_FOUND when there is none.
int32_t muond_session_last_outcome(muond_session* session, muond_text** json, muond_error** error);

#ifdef __cplusplus
}  // extern "C"
#endif
