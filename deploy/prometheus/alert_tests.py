"""When each alert must fire and when not: series as promtool writes them, a value a minute."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """Two histories that differ in what the alert is about."""
    fires: dict
    silent: dict
    at: str  # evaluated then, in both histories
    labels: dict  # of the alert that fires, beside its severity
    description: str
    before: str = ""  # the first history is still silent then


RUN = {"job": "muond", "run": "r"}
RUN_HERE = {"instance": "a", **RUN}


def at(name, instance="a", run="r", **labels):
    """A series of one daemon and run."""
    inner = ",".join(f'{key}="{value}"' for key, value in
                     {"job": "muond", "instance": instance, "run": run, **labels}.items())
    return f"{name}{{{inner}}}"


def daemon(name, **labels):
    inner = ",".join(f'{key}="{value}"' for key, value in
                     {"job": "muond", "instance": "a", **labels}.items())
    return f"{name}{{{inner}}}"


def steps(**rates):
    """Counters by outcome, so many a minute."""
    return {at("muond_steps_total", outcome=outcome): f"0+{rate}x90"
            for outcome, rate in rates.items()}


def outcomes(**rates):
    return {at("muond_newton_schulz_outcomes_total", group="g", outcome=outcome): f"0+{rate}x90"
            for outcome, rate in rates.items()}


def handled(**rates):
    labels = {"grpc_service": "muond.v1.Optimizer", "grpc_method": "Finish", "grpc_type": "unary"}
    return {daemon("grpc_server_handled_total", grpc_code=code, **labels): f"0+{rate}x90"
            for code, rate in rates.items()}


def durations(first, second):
    """Steps a minute up to two hours: below 0.1 s, then slower than that but below 1 s."""
    return {at("muond_step_duration_seconds_bucket", le="0.128"): first,
            at("muond_step_duration_seconds_bucket", le="1.024"): second,
            at("muond_step_duration_seconds_bucket", le="+Inf"): second}


MUON = {at("muond_parameters", group="g", algorithm="adamw"): "9x90",
        at("muond_muon_expected"): "1x90"}
ACTIVE = {at("muond_run_active"): "1x90"}
UPDATES = at("muond_muon_updates_total", group="g")

CASES = {
    "MuondDaemonDown": Case(
        {daemon("up"): "1x5 0x35"}, {daemon("up"): "1x5 0 1x35"}, "8m",
        {"job": "muond", "instance": "a"},
        "Daemon a has not answered a scrape for 2 minutes.", "7m"),
    "MuondAbsent": Case(
        {'up{job="other",instance="a"}': "1x40"}, {daemon("up"): "0x40"}, "6m", {"job": "muond"},
        "Prometheus has no target of job muond.", "4m"),
    "MuondDaemonRestarted": Case(
        {daemon("process_start_time_seconds"): "100x5 400x35"},
        {daemon("process_start_time_seconds"): "100x40"}, "10m",
        {"job": "muond", "instance": "a"},
        "a restarted 1 times in 15 minutes; check that its state came back."),
    "MuondRpcErrors": Case(
        handled(OK=95, Unavailable=5), handled(OK=95, Unavailable=0, InvalidArgument=5), "20m",
        {"job": "muond", "instance": "a", "grpc_service": "muond.v1.Optimizer",
         "grpc_method": "Finish"}, "a Finish: 5% fail.", "5m"),
    "MuondTransportErrors": Case(
        {daemon("muond_transport_errors_total", transport="grpc", reason="checksum"): "0+6x40"},
        {daemon("muond_transport_errors_total", transport="grpc", reason="checksum"): "0 1 2x40"},
        "12m", {"job": "muond", "instance": "a", "transport": "grpc"},
        "a (grpc): 0.1 errors per second.", "3m"),
    "MuondTransportFallback": Case(
        {daemon("muond_transport_fallbacks_total", **{"from": "arena", "to": "grpc"}): "0x5 1x35"},
        {daemon("muond_transport_fallbacks_total", **{"from": "arena", "to": "grpc"}): "1x40"},
        "10m", {"job": "muond", "instance": "a", "from": "arena", "to": "grpc"},
        "a went from arena to grpc; results stay right, throughput drops."),
    "MuondRunFailed": Case(
        {at("muond_run_state", state="failed"): "0x5 1x35",
         at("muond_run_state", state="running"): "1x5 0x35"},
        {at("muond_run_state", state="failed"): "0x40",
         at("muond_run_state", state="running"): "1x40"}, "6m", RUN,
        "Run r takes no more steps until it is restored."),
    "MuondTrainersMissing": Case(
        {at("muond_trainers_connected"): "1x40", at("muond_trainers_expected"): "2x40"},
        {at("muond_trainers_connected"): "2x40", at("muond_trainers_expected"): "2x40"}, "3m",
        RUN_HERE, "Run r on a: only 1 trainers are registered.", "1m"),
    "MuondStepStuck": Case(
        {at("muond_step_inflight"): "1x40",
         at("muond_step_inflight_start_timestamp_seconds"): "60x40"},
        {at("muond_step_inflight"): "0x40",
         at("muond_step_inflight_start_timestamp_seconds"): "0x40"}, "5m",
        RUN_HERE, "Run r on a: the step in flight is 4m 0s old.", "3m"),
    "MuondNoProgress": Case(
        {**ACTIVE, at("muond_last_step_timestamp_seconds"): "60x40"},
        {**ACTIVE, at("muond_last_step_timestamp_seconds"): "60+60x40"}, "18m",
        RUN, "Run r last stepped 17m 0s ago.", "15m"),
    "MuondStepSlow": Case(
        durations("0+60x120 7200x60", "0+60x180"), durations("0+60x180", "0+60x180"), "145m",
        {**RUN}, "Run r: p95 optimizer step time is 979.2ms.", "125m"),
    "MuondShardImbalance": Case(
        {at("muond_shard_busy_seconds_total"): "0+30x40",
         at("muond_shard_busy_seconds_total", "b"): "0+10x40",
         at("muond_shard_busy_seconds_total", "c"): "0+5x40"},
        {at("muond_shard_busy_seconds_total"): "0+30x40",
         at("muond_shard_busy_seconds_total", "b"): "0+25x40",
         at("muond_shard_busy_seconds_total", "c"): "0+30x40"}, "20m", RUN,
        "Run r: the busiest daemon works 2 times the mean.", "10m"),
    "MuondReplicaDivergence": Case(
        {at("muond_last_step"): "0+10x40", at("muond_last_step", "b"): "0+10x5 50x35"},
        {at("muond_last_step"): "0+10x40", at("muond_last_step", "b"): "7+10x40"}, "13m", RUN,
        "Run r: step numbers differ by 80.", "10m"),
    "MuondMuonInactive": Case(
        {**MUON, at("muond_parameters", group="g", algorithm="muon"): "0x90"},
        {**MUON, at("muond_parameters", group="g", algorithm="muon"): "1x90"}, "2m", RUN,
        "Run r was configured for Muon, but every parameter went to AdamW.", "0m"),
    "MuondMuonUpdatesStalled": Case(
        {**MUON, **steps(applied=60), UPDATES: "7x90"},
        {**MUON, **steps(applied=60), UPDATES: "0+60x90"}, "18m", RUN,
        "Run r applied steps in the last 10 minutes without one orthogonalized update.", "3m"),
    "MuondMomentumNonFinite": Case(
        {at("muond_nonfinite_tensors", kind="momentum"): "0x5 1x35",
         at("muond_nonfinite_tensors", "b", kind="master_weight"): "0x5 2x35"},
        {at("muond_nonfinite_tensors", kind="momentum"): "0x40"}, "7m", RUN,
        "Run r: 3 state tensors are non-finite. Later steps are refused; restore a checkpoint."),
    "MuondOverflowStorm": Case(
        steps(applied=10, skipped_overflow=10), steps(applied=10, skipped_norm_threshold=10),
        "15m", RUN, "Run r skips 50% of its steps for overflow.", "3m"),
    "MuondAllStepsSkipped": Case(
        steps(applied=0, skipped_state_overflow=10), steps(applied=1, skipped_overflow=10),
        "10m", RUN, "Run r makes no progress, all steps are skipped.", "2m"),
    "MuondLossScaleAtMinimum": Case(
        {at("muond_loss_scale"): "8 4 2 1x40", at("muond_loss_scale_min"): "1x40"},
        {at("muond_loss_scale"): "8 4 2x40", at("muond_loss_scale_min"): "1x40"}, "6m",
        RUN_HERE, "Run r: loss scale 1 cannot be lowered further.", "4m"),
    "MuondNewtonSchulzNotConverging": Case(
        outcomes(ok=990, diverged=10), outcomes(ok=990, diverged=0, low_rank=10), "10m", RUN,
        "Run r: 1% of the orthogonalizations diverged or came out non-finite, and were redone.",
        "2m"),
    "MuondMomentumLowRank": Case(
        outcomes(ok=25, low_rank=75), outcomes(ok=75, low_rank=25), "40m", RUN,
        "Run r: 75% of the matrices have mostly dead directions.", "20m"),
    "MuondMomentumStale": Case(
        {at("muond_momentum_stale_tensors"): "4x90",
         at("muond_momentum_stale_tensors", "b"): "0x90"},
        {at("muond_momentum_stale_tensors"): "4x20 0x70"}, "40m", RUN,
        "Run r: 4 state tensors are stale.", "20m"),
    "MuondCheckpointTooOld": Case(
        {**ACTIVE, at("muond_checkpoint_last_success_timestamp_seconds"): "60x90",
         at("muond_checkpoint_interval_seconds"): "600x90"},
        {**ACTIVE, at("muond_checkpoint_last_success_timestamp_seconds"): "60+60x90",
         at("muond_checkpoint_interval_seconds"): "600x90"}, "28m", RUN,
        "Run r: the last good checkpoint was 27m 0s ago.", "20m"),
    "MuondCheckpointFailing": Case(
        {at("muond_checkpoints_total", result="save_failed"): "0x5 1x35"},
        {at("muond_checkpoints_total", result="save_failed"): "1x40",
         at("muond_checkpoints_total", result="saved"): "0+1x40"}, "10m",
        {**RUN_HERE, "result": "save_failed"}, "Run r on a: 1 failures in 30 minutes."),
}
