/* The C interface as a C program sees it: a run from its opening to its end, with the golden numbers
 * of docs/semantics.md, and the errors that a caller must be able to tell apart. */
#define _POSIX_C_SOURCE 200809L /* mkdtemp */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client/c/muond.h"

static int failures = 0;

#define EXPECT(condition)                                               \
  do {                                                                  \
    if (!(condition)) {                                                 \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);   \
      ++failures;                                                       \
    }                                                                   \
  } while (0)

/* The call must succeed. */
static void ok(int line, int32_t code, muond_error* error) {
  if (code != MUOND_OK || error != NULL) {
    fprintf(stderr, "line %d: code %d: %s\n", line, code, muond_error_message(error, NULL));
    ++failures;
  }
  muond_error_free(error);
}
#define OK(call)                       \
  do {                                 \
    const int32_t called = (call);     \
    ok(__LINE__, called, error);       \
  } while (0)

/* The call must fail with the code, and the message must have the words. */
static void fails(int line, int32_t code, muond_error* error, int32_t wanted, const char* words) {
  size_t bytes = 0;
  const char* message = muond_error_message(error, &bytes);
  if (code != wanted || muond_error_code(error) != wanted || strstr(message, words) == NULL ||
      bytes != strlen(message)) {
    fprintf(stderr, "line %d: code %d, wanted %d with \"%s\": %s\n", line, code, wanted, words,
            message);
    ++failures;
  }
  muond_error_free(error);
}
#define FAILS(call, wanted, words)                         \
  do {                                                     \
    const int32_t called = (call);                         \
    fails(__LINE__, called, error, (wanted), (words));     \
  } while (0)

static const char kRegistration[] =
    "{\"run\": {\"name\": \"c\", \"worldSize\": 1,"
    " \"parameters\": [{\"name\": \"w\", \"shape\": {\"dims\": [2, 2]}, \"dtype\": \"DTYPE_F32\","
    "                   \"group\": \"all\", \"role\": \"ROLE_HIDDEN\"},"
    "                  {\"name\": \"b\", \"shape\": {\"dims\": [\"2\"]}, \"dtype\": \"DTYPE_F32\","
    "                   \"group\": \"all\"}],"
    " \"groups\": [{\"name\": \"all\", \"muon\": {\"lr\": 0.1, \"weight_decay\": 0.1,"
    "               \"momentum\": 0.95}}],"
    " \"lossScale\": {\"mode\": \"MODE_DYNAMIC\", \"initial\": 1024}},"
    " \"rank\": 0, \"session\": \"SESSION\","
    " \"slices\": [{\"parameter\": \"w\", \"boxes\": [{\"offset\": [0, 0], \"size\": [2, 2]}]},"
    "              {\"parameter\": \"b\", \"boxes\": [{\"offset\": [0], \"size\": [2]}]}]}";

/* Joins as `who`, which has as many letters as SESSION. */
static int32_t join(const muond_session_options* options, const char* who, muond_session** session,
                    muond_error** error) {
  char text[sizeof kRegistration];
  memcpy(text, kRegistration, sizeof text);
  memcpy(strstr(text, "SESSION"), who, strlen("SESSION"));
  return muond_session_open(options, text, strlen(text), session, error);
}

static muond_source source(const char* name, const float* data, int64_t elements) {
  muond_source value;
  memset(&value, 0, sizeof value);
  value.parameter = name;
  value.parameter_bytes = strlen(name);
  value.data = data;
  value.elements = elements;
  value.dtype = MUOND_F32;
  return value;
}

/* Where w goes. */
static muond_sink sink_of(float* w) {
  muond_sink sink;
  memset(&sink, 0, sizeof sink);
  sink.parameter = "w";
  sink.parameter_bytes = 1;
  sink.data = w;
  sink.elements = 4;
  sink.dtype = MUOND_F32;
  return sink;
}

static void pull(muond_session* session, int64_t version, float* w) {
  muond_error* error = NULL;
  const muond_sink sink = sink_of(w);
  OK(muond_session_pull(session, version, &sink, 1, 0, &error));
}

static int near(float value, double wanted) { return fabs(value - wanted) < 2e-6; }

static muond_service* start(const char* listen, const char* checkpoints) {
  muond_error* error = NULL;
  muond_service_options options;
  memset(&options, 0, sizeof options);
  options.struct_bytes = sizeof options;
  options.threads = 1;
  options.log_level = "off";
  options.log_level_bytes = 3;
  options.listen = listen;
  options.listen_bytes = strlen(listen);
  options.checkpoint_dir = checkpoints;
  options.checkpoint_dir_bytes = strlen(checkpoints);
  muond_service* service = NULL;
  OK(muond_service_start(&options, &service, &error));
  if (service == NULL) exit(1);
  return service;
}

/* Gradients of one step: w's with the diagonal a, d, and b's, all times the loss scale. */
static void fill(float* w, float* b, double a, double d, double scale) {
  const double values[4] = {a * scale, 0, 0, d * scale};
  for (int i = 0; i < 4; ++i) w[i] = (float)values[i];
  b[0] = b[1] = (float)scale;
}

static const char kHyper[] =
    "{\"muon\": {\"all\": {\"lr\": 0.1, \"weightDecay\": 0.1, \"momentum\": 0.95}},"
    " \"adamw\": {\"all\": {\"lr\": 0.1, \"beta1\": 0.9, \"beta2\": 0.999, \"eps\": 1e-8}}}";

static muond_begin begin_of(double scale) {
  muond_begin begin;
  memset(&begin, 0, sizeof begin);
  begin.struct_bytes = sizeof begin;
  begin.step = -1;
  begin.loss_scale = scale;
  begin.hyperparameters = kHyper;
  begin.hyperparameters_bytes = strlen(kHyper);
  return begin;
}

static void steps(muond_session* session) {
  muond_error* error = NULL;
  float w[4] = {1, 0, 0, 1}, b[2] = {1, 1};
  muond_source slices[2] = {source("w", w, 4), source("b", b, 2)};
  int32_t complete = 0;
  OK(muond_session_initialize(session, slices, 2, &complete, &error));
  EXPECT(complete == 1);

  muond_outcome outcome;
  memset(&outcome, 0, sizeof outcome);
  outcome.struct_bytes = sizeof outcome;
  muond_begin begin = begin_of(0);
  fill(w, b, 3, 4, 1024);
  OK(muond_session_step(session, &begin, slices, 2, NULL, &outcome, &error));
  EXPECT(outcome.applied == 1 && outcome.version == 1 && outcome.newton_schulz_calls == 1);
  EXPECT(outcome.loss_scale == 1024 && fabs(outcome.grad_norm - sqrt(27)) < 1e-5);
  float got[4];
  pull(session, outcome.version, got);
  EXPECT(near(got[0], .9177124) && near(got[3], .8780796) && got[1] == 0);

  /* In pieces; a slice that changed after its push is a conflict until the step starts over. */
  fill(w, b, 9, 9, 1024);
  OK(muond_session_begin(session, &begin, &error));
  OK(muond_session_push(session, slices, 1, &error));
  fill(w, b, 1, 1, 1024);
  FAILS(muond_session_push(session, slices, 1, &error), MUOND_ALREADY_EXISTS, "\"w\"");
  OK(muond_session_raise_generation(session, "changed", 7, &error));
  OK(muond_session_begin(session, &begin, &error));
  OK(muond_session_push(session, slices, 2, &error));
  OK(muond_session_finish(session, NULL, &outcome, &error));
  pull(session, outcome.version, got);
  EXPECT(near(got[0], .8088734) && near(got[3], .7635475));

  /* An overflow is an outcome: nothing changes, the scale halves, the report names the parameter. */
  fill(w, b, INFINITY, 1, 1024);
  OK(muond_session_step(session, &begin, slices, 2, NULL, &outcome, &error));
  EXPECT(outcome.applied == 0 && outcome.cause == MUOND_SKIP_OVERFLOW);
  EXPECT(outcome.next_loss_scale == 512 && outcome.applied_steps == 2);
  muond_text* json = NULL;
  OK(muond_session_last_outcome(session, &json, &error));
  EXPECT(strstr(muond_text_data(json, NULL), "\"offenders\":[\"w\"]") != NULL);
  muond_text_free(json);
  OK(muond_session_skip(session, MUOND_SKIP_TRAINER, 512, &outcome, &error));
  EXPECT(outcome.cause == MUOND_SKIP_TRAINER && outcome.version == 4);

  /* An absent parameter stays as it is. */
  float before[4];
  pull(session, 4, before);
  const char* names[1] = {"w"};
  const size_t bytes[1] = {1};
  const muond_names absent = {names, bytes, 1};
  fill(w, b, 1, 1, 512);
  OK(muond_session_step(session, &begin, &slices[1], 1, &absent, &outcome, &error));
  EXPECT(outcome.applied == 1 && outcome.newton_schulz_calls == 0);
  pull(session, 5, got);
  EXPECT(memcmp(before, got, sizeof got) == 0);
}

static void reports(muond_session* session) {
  muond_error* error = NULL;
  muond_text* json = NULL;
  OK(muond_session_describe(session, &json, &error));
  EXPECT(strstr(muond_text_data(json, NULL), "ALGORITHM_MUON") != NULL);
  muond_text_free(json);
  OK(muond_session_transports(session, &json, &error));
  EXPECT(strstr(muond_text_data(json, NULL), "reason") != NULL);
  muond_text_free(json);
  OK(muond_session_status(session, &json, &error));
  EXPECT(strstr(muond_text_data(json, NULL), muond_version()) != NULL);
  muond_text_free(json);
  OK(muond_session_digest(session, &json, &error));
  EXPECT(strstr(muond_text_data(json, NULL), "tensorDigest") != NULL);
  muond_text_free(json);

  muond_position position;
  memset(&position, 0, sizeof position);
  position.struct_bytes = sizeof position;
  OK(muond_session_position(session, &position, &error));
  EXPECT(position.next_step == 5 && position.daemons == 1 && position.loss_scale == 512);
  EXPECT(position.last_step == 4 && position.last_applied == 1);
  /* A caller that was compiled with fewer fields keeps what lies behind them. */
  memset(&position, 0x5a, sizeof position);
  position.struct_bytes = offsetof(muond_position, next_step);
  const int64_t untouched = position.next_step;
  OK(muond_session_position(session, &position, &error));
  EXPECT(position.generation > 0 && position.next_step == untouched);
}

static void bad_arguments(muond_session* session) {
  muond_error* error = NULL;
  float w[4] = {0};
  muond_source slice = source("w", w, 4);
  slice.memory = 7;
  FAILS(muond_session_push(session, &slice, 1, &error), MUOND_UNIMPLEMENTED, "host memory");
  slice.memory = MUOND_CUDA;
  slice.device = -1;
  FAILS(muond_session_push(session, &slice, 1, &error), MUOND_INVALID_ARGUMENT, "device -1");
  slice = source("w", w, 4);
  slice.reserved = 1;
  FAILS(muond_session_push(session, &slice, 1, &error), MUOND_INVALID_ARGUMENT, "reserved");
  slice = source("w", w, 3);
  muond_begin begin = begin_of(0);
  FAILS(muond_session_step(session, &begin, &slice, 1, NULL, NULL, &error),
        MUOND_INVALID_ARGUMENT, "\"w\"");
  begin.hyperparameters = "{\"muons\": {}}";
  begin.hyperparameters_bytes = strlen(begin.hyperparameters);
  FAILS(muond_session_begin(session, &begin, &error), MUOND_INVALID_ARGUMENT, "muons");
  begin.struct_bytes = 0;
  FAILS(muond_session_begin(session, &begin, &error), MUOND_INVALID_ARGUMENT, "struct_bytes");
  muond_text* json = NULL;
  FAILS(muond_session_save(session, &json, &error), MUOND_FAILED_PRECONDITION, "checkpoint");
  FAILS(muond_session_push(NULL, NULL, 0, &error), MUOND_INVALID_ARGUMENT, "session");
  FAILS(muond_session_describe(session, NULL, &error), MUOND_INVALID_ARGUMENT, "text");
  FAILS(muond_session_push(session, NULL, 1, &error), MUOND_INVALID_ARGUMENT, "push");
  muond_session* other = (muond_session*)&error;
  FAILS(muond_session_open(NULL, "{", 1, &other, &error), MUOND_INVALID_ARGUMENT, "registration");
  EXPECT(other == NULL);
  /* Without a place for the error the code is all there is. */
  EXPECT(muond_session_push(NULL, NULL, 0, NULL) == MUOND_INVALID_ARGUMENT);
}

#define ADDITION(name)                                                                             \
  "{\"groups\": [{\"name\": \"late\", \"muon\": {\"lr\": 0.1, \"weight_decay\": 0.1,"                 \
  "              \"momentum\": 0.95}}],"                                                           \
  " \"parameters\": [{\"name\": \"" name "\", \"shape\": {\"dims\": [2, 2]},"                     \
  "                  \"dtype\": \"DTYPE_F32\", \"group\": \"late\", \"role\": \"ROLE_HIDDEN\"}],"      \
  " \"slices\": [{\"parameter\": \"" name "\", \"boxes\": [{\"offset\": [0, 0], \"size\": [2, 2]}]}]}"

static int32_t add(muond_session* session, const char* addition, muond_error** error) {
  return muond_session_add_parameters(session, addition, strlen(addition), error);
}

/* A parameter joins the open run before step 5: its first step there is what any first step is, and
 * the others take theirs as if it was not there. */
static void additions(muond_session* session) {
  muond_error* error = NULL;
  FAILS(add(session, "{", &error), MUOND_INVALID_ARGUMENT, "addition");
  FAILS(add(session, "{\"rank\": 1}", &error), MUOND_INVALID_ARGUMENT, "the session's");
  FAILS(add(session, "{}", &error), MUOND_INVALID_ARGUMENT, "add parameters");
  FAILS(add(session, ADDITION("w"), &error), MUOND_ALREADY_EXISTS, "\"w\"");
  FAILS(add(NULL, ADDITION("v"), &error), MUOND_INVALID_ARGUMENT, "session");
  OK(add(session, ADDITION("v"), &error));
  OK(add(session, ADDITION("v"), &error)); /* repeated: it is there */
  muond_text* json = NULL;
  OK(muond_session_describe(session, &json, &error));
  EXPECT(strstr(muond_text_data(json, NULL), "\"name\":\"v\"") != NULL);
  muond_text_free(json);

  float v[4] = {1, 0, 0, 1}, w[4], b[2], got[4];
  muond_source late = source("v", v, 4);
  int32_t complete = 0;
  OK(muond_session_initialize(session, &late, 1, &complete, &error));
  EXPECT(complete == 1);
  fill(v, b, 3, 4, 512);
  fill(w, b, 1, 1, 512);
  const muond_source slices[3] = {source("w", w, 4), source("b", b, 2), late};
  muond_begin begin = begin_of(0);
  muond_outcome outcome;
  memset(&outcome, 0, sizeof outcome);
  outcome.struct_bytes = sizeof outcome;
  OK(muond_session_step(session, &begin, slices, 3, NULL, &outcome, &error));
  EXPECT(outcome.step == 5 && outcome.applied == 1 && outcome.newton_schulz_calls == 2);
  muond_sink sink = sink_of(got);
  sink.parameter = "v";
  OK(muond_session_pull(session, outcome.version, &sink, 1, 0, &error));
  EXPECT(near(got[0], .9177124) && near(got[3], .8780796) && got[1] == 0);
}

/* One step with gradients that overflow nothing. */
static void one_step(muond_session* session, double a, double d) {
  muond_error* error = NULL;
  float stepped[4], pulled[4];
  const muond_sink sink = sink_of(stepped);
  float w[4], b[2];
  fill(w, b, a, d, 1024);
  muond_source slices[2] = {source("w", w, 4), source("b", b, 2)};
  muond_begin begin = begin_of(0);
  muond_outcome outcome;
  memset(&outcome, 0, sizeof outcome);
  outcome.struct_bytes = sizeof outcome;
  OK(muond_session_step_and_pull(session, &begin, slices, 2, NULL, &sink, 1, &outcome, &error));
  pull(session, outcome.version, pulled);
  EXPECT(memcmp(stepped, pulled, sizeof pulled) == 0);
}

static int has(muond_text* json, const char* words) {
  const int found = strstr(muond_text_data(json, NULL), words) != NULL;
  if (!found) fprintf(stderr, "no %s in %s\n", words, muond_text_data(json, NULL));
  muond_text_free(json);
  return found;
}

/* A service with checkpoints: a run goes back to one, and a new service goes on from it. */
static void checkpoints(void) {
  muond_error* error = NULL;
  char directory[] = "/tmp/muond-abi-XXXXXX";
  if (mkdtemp(directory) == NULL) exit(1);
  muond_service* service = start("", directory);
  muond_session_options options;
  memset(&options, 0, sizeof options);
  options.struct_bytes = sizeof options;
  options.service = service;
  muond_session* session = NULL;
  OK(join(&options, "session", &session, &error));
  muond_text* json = NULL;
  FAILS(muond_session_save(session, &json, &error), MUOND_FAILED_PRECONDITION, "\"c\"");
  EXPECT(json == NULL);
  float w[4] = {1, 0, 0, 1}, b[2] = {1, 1}, after_one[4], got[4];
  muond_source slices[2] = {source("w", w, 4), source("b", b, 2)};
  OK(muond_session_initialize(session, slices, 2, NULL, &error));
  one_step(session, 3, 4);
  pull(session, 1, after_one);
  OK(muond_session_save(session, &json, &error));
  EXPECT(has(json, "\"name\":\"ckpt-1\""));
  one_step(session, 1, 1);
  pull(session, 2, got);
  EXPECT(memcmp(after_one, got, sizeof got) != 0);
  FAILS(muond_session_restore(session, "ckpt-7", 6, 0, &json, &error), MUOND_NOT_FOUND, "ckpt-7");
  OK(muond_session_restore(session, "ckpt-1", 6, 0, &json, &error));
  EXPECT(has(json, "\"nextStep\":\"1\""));
  pull(session, 1, got);
  EXPECT(memcmp(after_one, got, sizeof got) == 0);
  FAILS(muond_session_await_restore(session, 0, &error), MUOND_INVALID_ARGUMENT, "timeout");
  muond_session_free(session);
  muond_service_free(service);

  service = start("", directory);
  options.service = service;
  OK(join(&options, "session", &session, &error));
  OK(muond_session_await_restore(session, 20, &error));
  muond_position position;
  memset(&position, 0, sizeof position);
  position.struct_bytes = sizeof position;
  OK(muond_session_position(session, &position, &error));
  EXPECT(position.state == MUOND_RUN_RUNNING && position.next_step == 1);
  pull(session, 1, got);
  EXPECT(memcmp(after_one, got, sizeof got) == 0);
  one_step(session, 1, 1);
  muond_session_free(session);
  muond_service_free(service);
  char command[64];
  snprintf(command, sizeof command, "rm -rf %s", directory);
  EXPECT(system(command) == 0);
}

static void sockets(void) {
  muond_error* error = NULL;
  muond_service* service = start("127.0.0.1:0", "");
  muond_session_options options;
  memset(&options, 0, sizeof options);
  options.struct_bytes = sizeof options;
  options.endpoint = muond_service_address(service, &options.endpoint_bytes);
  muond_session *first = NULL, *second = NULL;
  OK(join(&options, "session", &first, &error));
  FAILS(join(&options, "another", &second, &error), MUOND_ALREADY_EXISTS, "session");
  EXPECT(second == NULL);
  steps(first);
  int32_t closed = 0;
  OK(muond_session_close(first, &closed, &error));
  EXPECT(closed == 1);
  muond_session_free(first);

  char endpoint[64];
  snprintf(endpoint, sizeof endpoint, "%s", options.endpoint);
  muond_service_free(service);
  options.endpoint = endpoint;
  options.call_timeout = 1;
  const time_t begun = time(NULL);
  const int32_t code = join(&options, "session", &first, &error);
  EXPECT(code == MUOND_UNAVAILABLE || code == MUOND_DEADLINE_EXCEEDED);
  EXPECT(strstr(muond_error_message(error, NULL), endpoint) != NULL);
  EXPECT(time(NULL) - begun < 10);
  muond_error_free(error);
}

int main(void) {
  EXPECT(muond_abi_version() == MUOND_ABI_VERSION);
  if (!muond_has_service()) {
    fprintf(stderr, "built without the service: nothing to test against\n");
    return 1;
  }
  muond_error* error = NULL;
  muond_service* service = start("", "");
  muond_session_options options;
  memset(&options, 0, sizeof options);
  options.struct_bytes = sizeof options;
  options.service = service;
  muond_session* session = NULL;
  OK(join(&options, "session", &session, &error));
  if (session == NULL) return 1;
  steps(session);
  reports(session);
  bad_arguments(session);
  additions(session);
  OK(muond_session_close(session, NULL, &error));
  muond_session_free(session);
  muond_service_free(service);
  sockets();
  checkpoints();
  muond_error_free(NULL);
  muond_text_free(NULL);
  muond_session_free(NULL);
  muond_service_free(NULL);
  if (failures == 0) printf("the C interface works\n");
  return failures == 0 ? 0 : 1;
}
