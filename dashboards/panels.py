"""What the dashboards show: one table of panels for each, made into Grafana's JSON by generate.py.

In a query, %D stands for the matcher of job and instance, %R for that and the run, %G for that and
the group; %R{outcome="applied"} adds labels. A panel whose metrics docs/metrics.md does not have is
left out until it does.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Panel:
    """One panel. `queries`: (expression, legend) pairs."""
    title: str
    kind: str  # stat, timeseries, stacked, heatmap, table
    unit: str
    queries: tuple
    text: str  # the description: what a reader should look for
    bad: float = None  # the value from which on it is red


@dataclasses.dataclass(frozen=True)
class Row:
    title: str
    panels: tuple
    width: int = 12  # of 24 columns


@dataclasses.dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    text: str
    rows: tuple


RATE = "[$__rate_interval]"


def quantiles(metric, matcher, by, levels=(.5, .95)):
    return tuple(
        (f"histogram_quantile({level}, sum by (le{by}) (rate({metric}_bucket{matcher}{RATE})))",
         f"p{level * 100:g}" + "".join(f" {{{{{name}}}}}" for name in by.split(", ") if name))
        for level in levels)


def heat(metric, matcher):
    return ((f"sum by (le) (increase({metric}_bucket{matcher}{RATE}))", "{{le}}"),)


def per_run(expr):
    """Every daemon of a run counts what the run did: one of them is enough."""
    return f"max without (instance) ({expr})"


def rate(metric, matcher="%R", function="rate"):
    return f"{function}({metric}{matcher}{RATE})"


def steps(matcher="%R", by=""):
    """Steps per second."""
    inner = per_run("sum without (outcome) (" + rate("muond_steps_total", matcher) + ")")
    return f"sum{by} ({inner})"


OVERVIEW = Dashboard(
    "muond-overview", "muond: Overview", "Is training going on, and is it right?", (
        Row("At a glance", (
            Panel("Active runs", "stat", "none",
                  (("count(count by (run) (muond_run_active%R))", ""),),
                  "Runs that are open (muond_run_active)."),
            Panel("Steps per second", "stat", "ops",
                  ((steps(), ""),), "All runs together (muond_steps_total)."),
            Panel("Step time, p95", "stat", "s",
                  ((f"histogram_quantile(0.95, sum by (le) "
                    f"(rate(muond_step_duration_seconds_bucket%R{RATE})))", ""),),
                  "From a step's first Begin to its outcome (muond_step_duration_seconds)."),
            Panel("Steps skipped", "stat", "percentunit",
                  ((steps('%R{outcome=~"skipped_.*"}') + " / (" + steps() + " > 0)", ""),),
                  "Share of the steps that changed nothing (muond_steps_total).", .2),
            Panel("Loss scale", "stat", "short", (("min(muond_loss_scale%R)", ""),),
                  "The lowest among the runs (muond_loss_scale)."),
            Panel("Matrices on Muon", "stat", "none",
                  (("sum(" + per_run('muond_parameters%G{algorithm="muon"}') + ")", ""),),
                  "0 in a run that wants Muon is an alarm: everything fell to AdamW "
                  "(muond_parameters)."),
            Panel("Newton-Schulz diverged", "stat", "percentunit",
                  (('sum(rate(muond_newton_schulz_outcomes_total%G{outcome=~"diverged|nonfinite"}'
                    f"{RATE})) / (sum(rate(muond_newton_schulz_outcomes_total%G{RATE})) > 0)",
                    ""),),
                  "Share of orthogonalizations that had to be redone "
                  "(muond_newton_schulz_outcomes_total).", .001),
            Panel("Non-finite state", "stat", "none", (("sum(muond_nonfinite_tensors%R)", ""),),
                  "State tensors with NaN or infinity. Anything but 0 needs a restore "
                  "(muond_nonfinite_tensors).", 1),
            Panel("Unreachable daemons", "stat", "none",
                  (('count(up{job=~"$job",instance=~"$instance"} == 0) or vector(0)', ""),),
                  "Daemons that did not answer the last scrape (up).", 1),
            Panel("Alerts that fire", "stat", "none",
                  (('count(ALERTS{alertstate="firing",alertname=~"Muond.*"}) or vector(0)', ""),),
                  "Of deploy/prometheus/muond.rules.yml (ALERTS).", 1),
            Panel("Transfer errors", "stat", "ops",
                  ((f"sum(rate(muond_transport_errors_total%D{RATE}))", ""),),
                  "Chunks that arrived damaged, late or not at all (muond_transport_errors_total).",
                  .05),
            Panel("Oldest step in flight", "stat", "s",
                  (("max((time() - muond_step_inflight_start_timestamp_seconds%R) "
                    "* muond_step_inflight%R)", ""),),
                  "A hung step counts nothing; only its age shows it "
                  "(muond_step_inflight_start_timestamp_seconds, muond_step_inflight).", 120),
        ), 4),
        Row("Steps", (
            Panel("Steps by outcome", "stacked", "ops",
                  ((f"sum by (run, outcome) ({per_run(rate('muond_steps_total'))})",
                    "{{run}} {{outcome}}"),), "Per second (muond_steps_total)."),
            Panel("Step time", "timeseries", "s",
                  quantiles("muond_step_duration_seconds", "%R", ", run", (.5, .95, .99)),
                  "Quantiles over steps (muond_step_duration_seconds)."),
            Panel("Last step", "timeseries", "none",
                  (("muond_last_step%R", "{{run}} {{instance}}"),),
                  "Lines of one run must lie on each other: daemons step together "
                  "(muond_last_step)."),
            Panel("Time since the last step", "timeseries", "s",
                  (("time() - max by (run) (muond_last_step_timestamp_seconds%R)", "{{run}}"),),
                  "muond_last_step_timestamp_seconds.", 900),
        )),
        Row("Numerics", (
            Panel("Loss scale", "timeseries", "short",
                  ((f"{per_run('muond_loss_scale%R')}", "{{run}}"),),
                  "Grows by itself, halves with overflow (muond_loss_scale)."),
            Panel("Gradient norm", "timeseries", "short",
                  ((f"{per_run('muond_grad_norm%R')}", "{{run}}"),),
                  "Global, unscaled, before clipping (muond_grad_norm)."),
        )),
    ))

HEALTH = Dashboard(
    "muond-health", "muond: Optimizer health", "Is the arithmetic healthy?", (
        Row("Loss scale and gradients", (
            Panel("Loss scale and its floor", "timeseries", "short",
                  ((f"{per_run('muond_loss_scale%R')}", "{{run}}"),
                   (f"{per_run('muond_loss_scale_min%R')}", "{{run}} floor")),
                  "At its floor nothing is left to lower (muond_loss_scale, "
                  "muond_loss_scale_min)."),
            Panel("Changes of the loss scale", "stacked", "none",
                  (("sum by (run, direction) (" + per_run(rate("muond_loss_scale_changes_total",
                                                               function="increase")) + ")",
                    "{{run}} {{direction}}"),), "muond_loss_scale_changes_total."),
            Panel("Gradient norm", "timeseries", "short",
                  ((f"{per_run('muond_grad_norm%R')}", "{{run}}"),),
                  "Global, unscaled, before clipping (muond_grad_norm)."),
            Panel("Steps clipped", "timeseries", "percentunit",
                  ((f"sum by (run) ({per_run(rate('muond_grad_clipped_steps_total'))})"
                    " / (" + steps('%R{outcome="applied"}', " by (run)") + " > 0)",
                    "{{run}}"),), "Share of the applied steps (muond_grad_clipped_steps_total)."),
            Panel("Skips in a row", "timeseries", "none",
                  ((f"{per_run('muond_consecutive_skips%R')}", "{{run}}"),),
                  "muond_consecutive_skips.", 10),
            Panel("Non-finite gradient elements", "timeseries", "ops",
                  ((f"sum by (run) ({per_run(rate('muond_nonfinite_elements_total'))})",
                    "{{run}}"),), "Per second (muond_nonfinite_elements_total)."),
        )),
        Row("State", (
            Panel("Non-finite state tensors", "timeseries", "none",
                  (("sum by (run, kind) (muond_nonfinite_tensors%R)", "{{run}} {{kind}}"),),
                  "Must be 0 (muond_nonfinite_tensors).", 1),
            Panel("Momentum norm", "timeseries", "short",
                  (("sqrt(sum by (run, group) (muond_momentum_norm%G ^ 2))", "{{run}} {{group}}"),),
                  "Over the daemons' shards; momentum that dies or explodes shows here first "
                  "(muond_momentum_norm)."),
            Panel("Weight norm", "timeseries", "short",
                  (("sqrt(sum by (run, group) (muond_weight_norm%G ^ 2))", "{{run}} {{group}}"),),
                  "Of the master weights (muond_weight_norm)."),
            Panel("Learning rate", "timeseries", "short",
                  ((f"{per_run('muond_learning_rate%G')}", "{{run}} {{group}}"),),
                  "In force (muond_learning_rate)."),
            Panel("Cosine of gradient and momentum", "heatmap", "none",
                  heat("muond_momentum_grad_cosine", "%G"),
                  "Over tensors and steps. Above 0: gradients go on as before; around 0: noise; "
                  "below 0: momentum points the wrong way (muond_momentum_grad_cosine)."),
            Panel("Cosine, quantiles", "timeseries", "none",
                  quantiles("muond_momentum_grad_cosine", "%G", ", run, group", (.1, .5, .9)),
                  "No mean: cosines are negative, too, and rate() takes a sum that falls for a "
                  "restart (muond_momentum_grad_cosine)."),
            Panel("Stale tensors", "timeseries", "none",
                  (("sum by (run) (muond_momentum_stale_tensors%R)", "{{run}}"),),
                  "State tensors without a gradient for 100 applied steps or more "
                  "(muond_momentum_stale_tensors)."),
        )),
        Row("Newton-Schulz", (
            Panel("Residual", "heatmap", "none", heat("muond_newton_schulz_residual", "%G"),
                  "RMS of O^T O - I in sampled steps. 0.3 to 0.45 is healthy for the quintic "
                  "coefficients, towards 1 fewer directions live, above 1.05 it diverged "
                  "(muond_newton_schulz_residual)."),
            Panel("Outcomes", "stacked", "ops",
                  ((f"sum by (outcome) (rate(muond_newton_schulz_outcomes_total%G{RATE}))",
                    "{{outcome}}"),),
                  "Every orthogonalization (muond_newton_schulz_outcomes_total)."),
            Panel("Special cases", "timeseries", "ops",
                  ((f"sum by (kind) (rate(muond_newton_schulz_special_total%G{RATE}))",
                    "{{kind}}"),),
                  "Zero matrices, and results redone in fp32 (muond_newton_schulz_special_total)."),
            Panel("Orthogonalizations and updates", "timeseries", "ops",
                  ((f"sum(rate(muond_newton_schulz_calls_total%G{RATE}))", "orthogonalizations"),
                   (f"sum(rate(muond_muon_updates_total%G{RATE}))", "updates")),
                  "Per second (muond_newton_schulz_calls_total, muond_muon_updates_total)."),
        )),
        Row("Updates", (
            Panel("RMS(update) / RMS(weight)", "heatmap", "none",
                  heat("muond_update_rms_ratio", "%G"),
                  "Over tensors and steps; around 1e-3 is common (muond_update_rms_ratio)."),
            Panel("RMS(update) / RMS(weight), quantiles", "timeseries", "short",
                  quantiles("muond_update_rms_ratio", "%G", ", run, group"),
                  "muond_update_rms_ratio."),
            Panel("Parameters by algorithm", "table", "none",
                  ((f"sum by (run, algorithm) ({per_run('muond_parameters%G')})",
                    "{{run}} {{algorithm}}"),), "Tied ones once (muond_parameters)."),
            Panel("Elements by algorithm", "table", "short",
                  ((f"sum by (run, algorithm) ({per_run('muond_parameter_elements%G')})",
                    "{{run}} {{algorithm}}"),
                   (f"{per_run('muond_muon_expected%R')}", "{{run}} expects Muon")),
                  "Tied ones once (muond_parameter_elements, muond_muon_expected)."),
        )),
        Row("Worst parameters", tuple(
            Panel(f"Five largest: {title}", "timeseries", "short",
                  ((f'max by (run, rank) (muond_worst_value%R{{measure="{measure}"}})',
                    "{{run}} #{{rank}}"),),
                  "muonctl params --worst names them (muond_worst_value).")
            for title, measure in (("residual", "newton_schulz_residual"),
                                   ("update ratio", "update_rms_ratio"),
                                   ("gradient norm", "grad_norm"))), 8),
    ))

DAEMONS = Dashboard(
    "muond-daemons", "muond: Daemons", "Which machine is slow, full or gone?", (
        Row("Daemons", (
            Panel("Builds", "table", "none",
                  (("muond_build_info%D", "{{instance}} {{version}} {{revision}} {{compiler}}"),
                   ("muond_backend_info%D", "{{instance}} {{backend}} {{device}} {{model}}")),
                  "Daemons of a run must be of one build (muond_build_info, muond_backend_info)."),
            Panel("Ready, and up for", "table", "s",
                  (("muond_ready%D", "{{instance}} ready"),
                   ("time() - process_start_time_seconds%D", "{{instance}} uptime")),
                  "muond_ready, process_start_time_seconds."),
            Panel("State of each run", "table", "none",
                  (("sum by (run, instance, state) (muond_run_state%R) == 1",
                    "{{run}} {{instance}} {{state}}"),), "muond_run_state."),
            Panel("Trainers", "timeseries", "none",
                  (("min by (run) (muond_trainers_connected%R)", "{{run}} registered"),
                   ("max by (run) (muond_trainers_expected%R)", "{{run}} needed")),
                  "muond_trainers_connected, muond_trainers_expected."),
        )),
        Row("Work", (
            Panel("Busy", "timeseries", "percentunit",
                  ((f"rate(muond_shard_busy_seconds_total%R{RATE})", "{{run}} {{instance}}"),),
                  "Time computing per second, over all devices of a daemon: lines that lie apart "
                  "are an uneven plan or uneven machines (muond_shard_busy_seconds_total)."),
            Panel("Elements owned", "timeseries", "short",
                  (("muond_shard_elements%R", "{{run}} {{instance}}"),), "muond_shard_elements."),
            Panel("Where a step's time goes", "stacked", "s",
                  ((f"sum by (phase) (rate(muond_step_phase_seconds_sum%D{RATE}))", "{{phase}}"),),
                  "Seconds per second, all daemons together (muond_step_phase_seconds)."),
            Panel("Jobs that wait", "timeseries", "none",
                  (("muond_queue_depth%D", "{{instance}} {{queue}}"),), "muond_queue_depth."),
            Panel("Peers' answers", "timeseries", "s",
                  quantiles("muond_peer_rtt_seconds", "%D", ", instance"),
                  "Time until another daemon answered a vote (muond_peer_rtt_seconds)."),
            Panel("Slices that steps wait for", "timeseries", "none",
                  (("muond_step_waiting_shards%R", "{{run}} {{instance}}"),),
                  "muond_step_waiting_shards."),
        )),
        Row("Memory and process", (
            Panel("Memory of the runs", "stacked", "bytes",
                  (("sum by (instance, kind) (muond_memory_bytes%D)", "{{instance}} {{kind}}"),),
                  "muond_memory_bytes."),
            Panel("Memory of the process", "timeseries", "bytes",
                  (("process_resident_memory_bytes%D", "{{instance}} resident"),
                   ("process_virtual_memory_bytes%D", "{{instance}} virtual")),
                  "process_resident_memory_bytes, process_virtual_memory_bytes."),
            Panel("Processor", "timeseries", "percentunit",
                  ((f"rate(process_cpu_seconds_total%D{RATE})", "{{instance}}"),),
                  "1 is one core (process_cpu_seconds_total)."),
            Panel("File descriptors", "timeseries", "percentunit",
                  (("process_open_fds%D / process_max_fds%D", "{{instance}}"),),
                  "Share of the limit (process_open_fds, process_max_fds).", .8),
            Panel("Log lines", "stacked", "ops",
                  ((f"sum by (instance, severity) (rate(muond_log_messages_total%D{RATE}))",
                    "{{instance}} {{severity}}"),), "muond_log_messages_total."),
        )),
        Row("Calls", (
            Panel("Calls", "timeseries", "ops",
                  ((f"sum by (grpc_method) (rate(grpc_server_started_total%D{RATE}))",
                    "{{grpc_method}}"),), "grpc_server_started_total."),
            Panel("Time of calls, p95", "timeseries", "s",
                  quantiles("grpc_server_handling_seconds", "%D", ", grpc_method", (.95,)),
                  "Finish waits for the other ranks; Push lasts as long as its stream "
                  "(grpc_server_handling_seconds)."),
            Panel("Calls that failed, by code", "stacked", "ops",
                  (('sum by (grpc_code) (rate(grpc_server_handled_total%D{grpc_code!~"OK|Canceled"}'
                    f"{RATE}))",
                    "{{grpc_code}}"),),
                  "Those that their caller gave up aside: votes of a step that ended meanwhile "
                  "(grpc_server_handled_total)."),
            Panel("Requests that came again", "timeseries", "ops",
                  ((f"sum by (run) (rate(muond_duplicate_requests_total%R{RATE}))", "{{run}}"),),
                  "Answered from memory (muond_duplicate_requests_total)."),
        )),
    ))

TRANSPORT = Dashboard(
    "muond-transport", "muond: Transport and checkpoints",
    "How do bytes come and go, and what is safe on disk?", (
        Row("Transport", (
            Panel("Payload", "timeseries", "Bps",
                  ((f"sum by (transport, direction) (rate(muond_transport_bytes_total%D{RATE}))",
                    "{{transport}} {{direction}}"),),
                  "Gradients in, parameters out (muond_transport_bytes_total)."),
            Panel("Messages", "timeseries", "ops",
                  ((f"sum by (transport, direction) (rate(muond_transport_messages_total%D{RATE}))",
                    "{{transport}} {{direction}}"),), "muond_transport_messages_total."),
            Panel("Bytes of a message", "timeseries", "bytes",
                  ((f"sum by (transport, direction) (rate(muond_transport_bytes_total%D{RATE})) / "
                    f"(sum by (transport, direction) "
                    f"(rate(muond_transport_messages_total%D{RATE})) > 0)",
                    "{{transport}} {{direction}}"),),
                  "Small messages cost a call each (muond_transport_bytes_total, "
                  "muond_transport_messages_total)."),
            Panel("Errors by reason", "stacked", "ops",
                  ((f"sum by (transport, reason) (rate(muond_transport_errors_total%D{RATE}))",
                    "{{transport}} {{reason}}"),), "muond_transport_errors_total."),
            Panel("Fallbacks", "timeseries", "none",
                  (("sum by (instance, from, to, reason) (muond_transport_fallbacks_total%D)",
                    "{{instance}} {{from}} to {{to}}: {{reason}}"),),
                  "Connections that could not use the fast path that was asked for "
                  "(muond_transport_fallbacks_total)."),
            Panel("Data paths chosen", "timeseries", "none",
                  ((f"sum by (transport) (increase(muond_transport_choices_total%D{RATE}))",
                    "{{transport}}"),), "At registrations (muond_transport_choices_total)."),
            Panel("Connections", "timeseries", "none",
                  (("sum by (transport) (muond_transport_connections%D)", "{{transport}}"),),
                  "muond_transport_connections."),
        )),
        Row("Checkpoints", (
            Panel("Age of the last good checkpoint", "timeseries", "s",
                  (("time() - max by (run) (muond_checkpoint_last_success_timestamp_seconds%R > 0)",
                    "{{run}}"),), "muond_checkpoint_last_success_timestamp_seconds."),
            Panel("Step of the last checkpoint", "timeseries", "none",
                  (("max by (run) (muond_checkpoint_last_step%R)", "{{run}} saved"),
                   ("max by (run) (muond_last_step%R)", "{{run}} now")),
                  "What would be lost lies between the lines (muond_checkpoint_last_step, "
                  "muond_last_step)."),
            Panel("Checkpoints by result", "stacked", "none",
                  ((f"sum by (run, result) (increase(muond_checkpoints_total%R{RATE}))",
                    "{{run}} {{result}}"),), "muond_checkpoints_total."),
            Panel("Time to write one", "timeseries", "s",
                  quantiles("muond_checkpoint_duration_seconds", "%D", ""),
                  "muond_checkpoint_duration_seconds."),
            Panel("Size", "timeseries", "bytes",
                  (("max by (run) (muond_checkpoint_size_bytes%R)", "{{run}}"),),
                  "muond_checkpoint_size_bytes."),
        )),
        Row("Buddies", (
            Panel("Sent to the buddy", "timeseries", "Bps",
                  ((f"sum by (instance) (rate(muond_buddy_sent_bytes_total%R{RATE}))",
                    "{{instance}}"),),
                  "Gradients of every step, and snapshots (muond_buddy_sent_bytes_total)."),
            Panel("Steps waited for the buddy", "timeseries", "s",
                  quantiles("muond_buddy_wait_seconds", "%R", ""),
                  "With all gradients reduced (muond_buddy_wait_seconds)."),
            Panel("Daemons brought back", "stacked", "none",
                  ((f"sum by (run, result) (increase(muond_buddy_recoveries_total%R{RATE}))",
                    "{{run}} {{result}}"),),
                  "failed: from a checkpoint instead (muond_buddy_recoveries_total)."),
        )),
    ))

DASHBOARDS = (OVERVIEW, HEALTH, DAEMONS, TRANSPORT)

# Metrics that no panel and no alert needs, and why they are exported all the same.
UNUSED = {}
