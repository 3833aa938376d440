"""The alerts, in one table: rules, tests and runbook pages are made from it (alerts.py).

In an expression, <5m> is a duration that the time scale divides, and <=120> a number of seconds.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Alert:
    """What fires, when, and what a person should know then."""
    name: str
    severity: str  # critical pages somebody, warning makes a ticket, info is for dashboards
    expr: str
    for_: str  # as <2m>; empty: at once
    summary: str
    description: str
    meaning: str
    check: tuple
    act: tuple
    dont: str


# level:metric:operations, as Prometheus' guides say.
RECORDING = {
    "run:muond_steps:rate5m":
        "max without (instance) (sum without (outcome) (rate(muond_steps_total[<5m>])))",
    "run:muond_steps_overflowed:ratio_rate5m":
        'max without (instance) (sum without (outcome) '
        '(rate(muond_steps_total{outcome=~"skipped_overflow|skipped_state_overflow"}[<5m>])))'
        " / (run:muond_steps:rate5m > 0)",
    "run:muond_steps_skipped:ratio_rate5m":
        'max without (instance) (sum without (outcome) '
        '(rate(muond_steps_total{outcome=~"skipped_.*"}[<5m>]))) / (run:muond_steps:rate5m > 0)',
    "run:muond_shard_busy:max_per_avg_rate5m":
        "max without (instance) (rate(muond_shard_busy_seconds_total[<5m>]))"
        " / (avg without (instance) (rate(muond_shard_busy_seconds_total[<5m>])) > 0)",
    "run:muond_newton_schulz_bad:ratio_rate5m":
        "sum without (instance, group, outcome) "
        '(rate(muond_newton_schulz_outcomes_total{outcome=~"diverged|nonfinite"}[<5m>]))'
        " / (sum without (instance, group, outcome) "
        "(rate(muond_newton_schulz_outcomes_total[<5m>])) > 0)",
    "run:muond_newton_schulz_low_rank:ratio_rate5m":
        "sum without (instance, group, outcome) "
        '(rate(muond_newton_schulz_outcomes_total{outcome="low_rank"}[<5m>]))'
        " / (sum without (instance, group, outcome) "
        "(rate(muond_newton_schulz_outcomes_total[<5m>])) > 0)",
}

DAEMONS = (
    Alert(
        "MuondDaemonDown", "critical", 'up{job="muond"} == 0', "<2m>",
        "Optimizer daemon cannot be scraped.",
        "Daemon {{ $labels.instance }} has not answered a scrape for 2 minutes.",
        "Prometheus gets no answer from the daemon's metrics address. Its runs stand still: a step "
        "needs the vote of every daemon of the run.",
        ("Is the process there: `systemctl status muond`, and its last lines: "
         "`journalctl -u muond -n 100`. A kernel that ran out of memory says so in `dmesg`.",
         "Does it answer trainers: `muonctl --endpoint ADDRESS health`. If it does, only the "
         "metrics "
         "address is wrong or closed off (`muonctl config`, setting `metrics-address`)."),
        ("Start it again. Its optimizer state is gone unless a checkpoint has it: the run shows "
         "`needs_restore` and trainers go on from the last checkpoint or with `reinitialize`.",),
        "Don't restart the other daemons of the run: they hold their shards of the state."),
    Alert(
        "MuondAbsent", "critical", 'absent(up{job="muond"})', "<5m>",
        "No optimizer daemon is known to Prometheus.",
        "Prometheus has no target of job muond.",
        "Nothing is scraped at all. Every other alert is blind until this one is gone.",
        ("Prometheus' page *Status, Targets*, and the job's name: the rules expect `muond`.",
         "Service discovery: do the daemons' addresses still resolve?"),
        ("Mend the scrape configuration; deploy/prometheus/prometheus.yml is an example.",),
        "Don't silence it while training goes on: silence looks like health."),
    Alert(
        "MuondDaemonRestarted", "warning",
        'changes(process_start_time_seconds{job="muond"}[<15m>]) > 0', "",
        "Optimizer daemon restarted.",
        "{{ $labels.instance }} restarted {{ $value }} times in 15 minutes; check that its state "
        "came back.",
        "The process began anew, and its memory with it: momentum and master weights are as old as "
        "what they were restored from.",
        ("Why it ended: `journalctl -u muond`, `dmesg` for memory.",
         "`muonctl runs`: is the run `running`, and at the step that the trainers are at?"),
        ("If a run is in `needs_restore`, restore a checkpoint, or let a trainer reinitialize "
         "it.",),
        "Don't raise limits before knowing why it ended."),
    Alert(
        "MuondRpcErrors", "warning",
        "sum without (grpc_code, grpc_type) (rate(grpc_server_handled_total{job=\"muond\","
        'grpc_code=~"Unknown|FailedPrecondition|ResourceExhausted|Internal|Unavailable|DataLoss'
        '|DeadlineExceeded"}[<5m>])) / (sum without (grpc_code, grpc_type) '
        '(rate(grpc_server_handled_total{job="muond"}[<5m>])) > 0) > 0.01', "<10m>",
        "More than one percent of the calls fail.",
        "{{ $labels.instance }} {{ $labels.grpc_method }}: {{ $value | humanizePercentage }} fail.",
        "Trainers or peers are refused, or wait in vain. They retry, so training may go on, "
        "slower.",
        ("The code: dashboard *Daemons*, panel *Calls that failed, by code*.",
         "FailedPrecondition: somebody is in another generation or step (`muonctl status`). "
         "DeadlineExceeded at Finish: another rank is late. ResourceExhausted: a limit "
         "(`muonctl config`). DataLoss: checksums don't match, suspect the network or memory."),
        ("Deal with the cause that the message names: refusals say object, action and cause.",),
        "Don't widen deadlines first: it hides which rank is late."),
    Alert(
        "MuondTransportErrors", "warning",
        "sum without (reason) (rate(muond_transport_errors_total[<5m>])) > 0.05", "<5m>",
        "Transfers between trainers and daemons fail.",
        "{{ $labels.instance }} ({{ $labels.transport }}): {{ printf \"%.2g\" $value }} errors "
        "per second.",
        "Chunks of gradients or parameters arrive damaged, late or not at all. Each is refused and "
        "sent again; nothing wrong reaches the state.",
        ("The reason: dashboard *Transport and checkpoints*. `checksum`: bytes changed on the way. "
         "`reset`, `timeout`: the connection. `no_memory`: staging limits.",),
        ("For `checksum`, take the machine or link out of service: see which instance it is.",),
        "Don't turn checks off."),
    Alert(
        "MuondTransportFallback", "warning", "increase(muond_transport_fallbacks_total[<15m>]) > 0",
        "",
        "A connection fell back to a slower transport.",
        "{{ $labels.instance }} went from {{ $labels.from }} to {{ $labels.to }}; results stay "
        "right, throughput drops.",
        "A fast path was asked for and could not be used. Such fallbacks without a word have cost "
        "others factors of hundreds (vLLM PR #55906, NIXL #1754).",
        ("The daemon's log says why. `muonctl doctor` checks what fast paths need: shared memory, "
         "locked memory, sockets, devices that reach each other.",),
        ("Mend what doctor names, restart the trainer.",),
        "Don't accept it as normal: step times before and after differ."),
)

RUNS = (
    Alert(
        "MuondRunFailed", "critical",
        'max without (instance, state) (muond_run_state{state=~"failed|needs_restore"}) == 1', "",
        "A run has failed or lost state.",
        "Run {{ $labels.run }} takes no more steps until it is restored.",
        "A daemon could not carry a step out, or lost its shards. The run refuses steps and pulls, "
        "so that nothing goes on from a state that cannot be trusted.",
        ("`muonctl status --run NAME`: the reason is in the notes under the table.",),
        ("Restore the last checkpoint, or reinitialize from the trainers' parameters: momentum "
         "then "
         "starts anew.",),
        "Don't reinitialize when a checkpoint exists: momentum is worth many steps."),
    Alert(
        "MuondTrainersMissing", "critical",
        "muond_trainers_connected < on (job, instance, run) muond_trainers_expected", "<2m>",
        "Fewer trainers have registered than the run needs.",
        "Run {{ $labels.run }} on {{ $labels.instance }}: only {{ $value }} trainers are "
        "registered.",
        "The run cannot begin a step before every rank has registered.",
        ("`muonctl runs`: column RANKS. `muonctl status`: which.",
         "The missing rank's own log: does it reach this daemon's address?"),
        ("Start the missing rank, or mend its endpoint.",),
        "Don't register a second trainer under a rank that is still alive."),
    Alert(
        "MuondStepStuck", "critical",
        "(time() - muond_step_inflight_start_timestamp_seconds) > <=120>"
        " and on (job, instance, run) muond_step_inflight == 1", "<1m>",
        "A step has been in flight for minutes.",
        "Run {{ $labels.run }} on {{ $labels.instance }}: the step in flight is "
        "{{ $value | humanizeDuration }} old.",
        "A step began and has no outcome: a rank did not finish, a slice is missing, or a daemon "
        "did "
        "not vote. Nothing is applied meanwhile.",
        ("`muonctl status --run NAME`: the notes say which ranks, slices and daemons it waits for.",
         "`muonctl trace`: in which phase the daemons are."),
        ("Bring back the rank or daemon. If a rank is gone for good, raise the generation: the "
         "step "
         "starts over.",),
        "Don't kill the daemon: the others keep the step open for it."),
    Alert(
        "MuondNoProgress", "warning",
        "(time() - max without (instance) (muond_last_step_timestamp_seconds)) > <=900>"
        " and on (run) max without (instance) (muond_run_active) == 1", "<1m>",
        "An open run has not stepped for a quarter of an hour.",
        "Run {{ $labels.run }} last stepped {{ $value | humanizeDuration }} ago.",
        "The run is open and holds memory, but no step ends.",
        ("Do the trainers live? An evaluation or a checkpoint of theirs may take this long.",
         "`muonctl status`: is a step in flight? Then see MuondStepStuck."),
        ("Close runs that nobody uses any more.",),
        "Don't close a run that has no checkpoint and may go on."),
    Alert(
        "MuondStepSlow", "warning",
        "histogram_quantile(0.95, sum without (instance) "
        "(rate(muond_step_duration_seconds_bucket[<5m>]))) > 2 * histogram_quantile(0.95, "
        "sum without (instance) (rate(muond_step_duration_seconds_bucket[<1h>] offset <1h>)))",
        "<15m>",
        "Step times doubled against an hour ago.",
        "Run {{ $labels.run }}: p95 optimizer step time is {{ $value | humanizeDuration }}.",
        "Steps take twice as long as they did. A step's time runs from its first Begin: late "
        "gradients count.",
        ("Dashboard *Daemons*, panel *Where a step's time goes*; `muonctl trace --steps 5`.",
         "If `receive` grew, the trainers or the network are slower; if a phase of computing grew, "
         "the machine is shared or throttled."),
        ("Find the phase first, then its cause.",),
        "Don't compare runs of different models by this alert."),
    Alert(
        "MuondShardImbalance", "warning", "run:muond_shard_busy:max_per_avg_rate5m > 1.5", "<15m>",
        "One daemon does much more work than the mean.",
        "Run {{ $labels.run }}: the busiest daemon works {{ $value | humanize }} times the mean.",
        "Every step waits for the slowest daemon.",
        ("`muonctl plan` says what the plan expects: one matrix can be larger than a fair share.",
         "If the plan is even, the machines are not: clocks, other work, memory."),
        ("Split large matrices (row split) if the model allows, or take the slow machine out.",),
        "Don't change the list of daemons of a running run."),
    Alert(
        "MuondReplicaDivergence", "critical",
        "max without (instance) (muond_last_step) - min without (instance) (muond_last_step) > 1"
        " and min without (instance) (changes(muond_last_step[<5m>])) == 0", "<2m>",
        "Daemons of one run disagree on the step number.",
        "Run {{ $labels.run }}: step numbers differ by {{ $value }}.",
        "Daemons of a run are at most one step apart for as long as a vote takes. More, with one "
        "that stands, is a daemon that fell out of the run, or two runs of one name. (While all of "
        "them step, numbers differ only because Prometheus scrapes one after the other.)",
        ("`muonctl --endpoint EACH runs`: generation and next step on each daemon.",
         "`muonctl digest` on each."),
        ("Restart from a checkpoint that all daemons share.",),
        "Don't let trainers go on pulling from both."),
)

NUMERICS = (
    Alert(
        "MuondMuonInactive", "critical",
        'sum without (instance, group, algorithm) (muond_parameters{algorithm="muon"}) == 0'
        " and on (run) max without (instance) (muond_muon_expected) == 1", "<1m>",
        "No matrix of the run is optimized by Muon.",
        "Run {{ $labels.run }} was configured for Muon, but every parameter went to AdamW.",
        "The loss still falls, so nobody notices: flattened shards, unknown logical shapes or "
        "roles "
        "sent every matrix to the auxiliary optimizer. It has happened in the field: DeepSpeed "
        "#8438 (0 of 14 matrices), #8441, #8461.",
        ("`muonctl routing`: the reason stands beside each parameter.",),
        ("Register logical shapes and roles; pin the algorithm where routing cannot know.",),
        "Don't go on training: the run is another experiment than the one you meant."),
    Alert(
        "MuondMuonUpdatesStalled", "critical",
        "sum without (instance, group) (increase(muond_muon_updates_total[<10m>])) == 0"
        " and on (run) sum without (instance, outcome) "
        '(increase(muond_steps_total{outcome="applied"}[<10m>])) > 0'
        " and on (run) max without (instance) (muond_muon_expected) == 1", "<5m>",
        "Steps are applied but no Muon update happens.",
        "Run {{ $labels.run }} applied steps in the last 10 minutes without one orthogonalized "
        "update.",
        "Muon's parameters are registered, and no gradient of theirs arrives: every step names "
        "them "
        "absent.",
        ("`muonctl params --worst`: column T of Muon's parameters stands still.",
         "The trainer: are hidden matrices frozen, or their gradients None?"),
        ("Mend the trainer.",),
        "Don't send zeros instead: momentum would go on moving the weights."),
    Alert(
        "MuondMomentumNonFinite", "critical",
        "sum without (instance, kind) (muond_nonfinite_tensors) > 0", "",
        "Optimizer state holds NaN or infinity.",
        "Run {{ $labels.run }}: {{ $value }} state tensors are non-finite. Later steps are "
        "refused; "
        "restore a checkpoint.",
        "A flipped bit or damaged memory: gradients that would do this are found before they touch "
        "state. Steps are skipped with cause state_overflow, so that it does not spread.",
        ("`muonctl params --worst`: the tensors by name.",
         "The machine: ECC errors (`nvidia-smi -q -d ECC`, `edac-util`)."),
        ("Restore the last checkpoint, on another machine if this one reports errors.",),
        "Don't zero the tensor and go on: other tensors may have been damaged unseen."),
    Alert(
        "MuondOverflowStorm", "warning", "run:muond_steps_overflowed:ratio_rate5m > 0.2", "<5m>",
        "More than a fifth of the steps overflow.",
        "Run {{ $labels.run }} skips {{ $value | humanizePercentage }} of its steps for overflow.",
        "Gradients are not finite at the loss scale that they are made with. A dynamic scale backs "
        "off; a storm means that it does not help, or grows again too soon.",
        ("`muonctl watch`: which parameters overflow, always the same?",
         "Dashboard *Optimizer health*: does the loss scale fall?"),
        ("Always the same parameter: look at that layer. All of them: lower the learning rate, or "
         "look at the data. Compare DeepSpeed #8432, where overflow handling itself was at "
         "fault.",),
        "Don't turn the check off."),
    Alert(
        "MuondAllStepsSkipped", "critical", "run:muond_steps_skipped:ratio_rate5m >= 0.99", "<3m>",
        "Every step is skipped.",
        "Run {{ $labels.run }} makes no progress, all steps are skipped.",
        "No step is applied, whatever the cause: overflow, damaged state, a norm threshold that is "
        "too low, or trainers that say Skip.",
        ("The cause: `muonctl status`, or panel *Steps by outcome*.",),
        ("By cause: overflow, see [MuondOverflowStorm](MuondOverflowStorm.md); state_overflow, see "
         "[MuondMomentumNonFinite](MuondMomentumNonFinite.md); norm_threshold, raise "
         "grad_norm_skip_threshold; trainer, ask the trainer.",),
        "Don't wait for it to pass: nothing changes between two skipped steps but the loss scale."),
    Alert(
        "MuondLossScaleAtMinimum", "critical",
        "muond_loss_scale <= on (job, instance, run) muond_loss_scale_min", "<2m>",
        "The dynamic loss scale is at its floor.",
        "Run {{ $labels.run }}: loss scale {{ $value }} cannot be lowered further.",
        "Backing off has not helped down to the floor: gradients are not finite at any scale.",
        ("`muonctl watch`: the offenders by name.", "Did the loss diverge before?"),
        ("Go back to a checkpoint from before the divergence, with a lower learning rate or "
         "without "
         "the batch that did it.",),
        "Don't lower the floor: a scale below it loses small gradients to zero."),
    Alert(
        "MuondNewtonSchulzNotConverging", "critical",
        "run:muond_newton_schulz_bad:ratio_rate5m > 0.001", "<2m>",
        "Newton-Schulz diverges on some matrices.",
        "Run {{ $labels.run }}: {{ $value | humanizePercentage }} of the orthogonalizations "
        "diverged "
        "or came out non-finite, and were redone.",
        "The fast path gave an implausible result. Each was redone by the fp32 standard path, so "
        "updates are right, but slow; a result that stays bad fails the run.",
        ("Custom coefficients? They must keep every singular value in [0, 1.3] bounded.",
         "One daemon only (panel *Outcomes*): suspect its processor or GPU."),
        ("With a standard coefficient set: run `muonctl doctor` there, take the machine out.",),
        "Don't raise residual_max: it is what keeps a broken product from the weights."),
    Alert(
        "MuondMomentumLowRank", "info", "run:muond_newton_schulz_low_rank:ratio_rate5m > 0.5",
        "<30m>",
        "Most momentum matrices are close to low rank.",
        "Run {{ $labels.run }}: {{ $value | humanizePercentage }} of the matrices have mostly dead "
        "directions.",
        "Four in five directions of these momenta carry nothing. Common for embeddings that were "
        "routed to Muon, rare tokens, tiny batches; otherwise a layer gets degenerate gradients.",
        ("`muonctl params --worst`: residuals near 1 name the matrices.",),
        ("If they are embeddings or heads, send them to AdamW.",),
        "Don't treat it as divergence: the updates are right for what the momentum holds."),
    Alert(
        "MuondMomentumStale", "info", "max without (instance) (muond_momentum_stale_tensors) > 0",
        "<30m>",
        "Some tensors have had no gradient for a hundred steps.",
        "Run {{ $labels.run }}: {{ $value }} state tensors are stale.",
        "Frozen layers, or experts without tokens. Absent gradients leave weights alone; gradients "
        "that are sent as zeros do not, since Muon's update has full size however small the "
        "momentum.",
        ("`muonctl params`: column T of the parameters that stand still.",),
        ("Name tensors without a gradient absent, or do not register frozen ones.",),
        "Don't send zeros for experts without tokens."),
)

CHECKPOINTS = (
    Alert(
        "MuondCheckpointTooOld", "warning",
        "(time() - max without (instance) (muond_checkpoint_last_success_timestamp_seconds > 0))"
        " > 2 * max without (instance) (muond_checkpoint_interval_seconds > 0)"
        " and on (run) max without (instance) (muond_run_active) == 1", "<5m>",
        "The last good checkpoint is more than two intervals old.",
        "Run {{ $labels.run }}: the last good checkpoint was {{ $value | humanizeDuration }} ago.",
        "If a daemon ended now, everything since then would be lost.",
        ("Does the run step at all (MuondNoProgress)?", "Space and speed of the disk: `df -h`."),
        ("Write one by hand: `muonctl checkpoint`.",),
        "Don't restart daemons before there is a new one."),
    Alert(
        "MuondCheckpointFailing", "warning",
        'increase(muond_checkpoints_total{result="save_failed"}[<30m>]) > 0', "",
        "Writing checkpoints fails.",
        "Run {{ $labels.run }} on {{ $labels.instance }}: {{ $value | humanize }} failures in 30 "
        "minutes.",
        "A checkpoint could not be written whole. The earlier ones are untouched.",
        ("The daemon's log names file and cause.", "Space, permissions, the mount."),
        ("Mend the disk, then write one by hand: `muonctl checkpoint`.",),
        "Don't delete older checkpoints to make room before a new one is verified."),
)

ALERTS = DAEMONS + RUNS + NUMERICS + CHECKPOINTS
