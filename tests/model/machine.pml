/* The machines, what crosses the network between them, and what is claimed of them: for step.pml,
 * which says when what happens. One inline for each event, named as in the C++. */

/* -- What crosses the network ------------------------------------------------------------------ */

/* A vote as its holder keeps it: its generation and what it says. Step and daemon are its place. */
#define NONE 0
#define FINE 1
#define OVERFLOW 2
#define ODD 3 /* fine, but the trainers told this daemon something else */
#define Vote(generation, says) ((generation) * 4 + (says))
#define GenerationOf(vote) ((vote) / 4)
#define Says(vote) ((vote) % 4)

/* All votes ever cast: what each says, in its generation, for its step, by its daemon. */
#define CAST(g, s, d) cast[(((g) - 1) * STEPS + (s)) * D + (d)]
byte cast[GENERATIONS * STEPS * D];

typedef Votes {
  byte by[D]
}

typedef Promise {
  byte next_step;   /* step */
  Votes now;   /* of it */
  Votes before /* of the step before it */
#ifdef REINIT
  byte lineage; /* of the state */
#endif
}

/* An attempt to raise the generation. */
typedef Attempt {
  byte generation;  /* 0: not begun */
  byte promised;    /* by which daemons, bits; their promises: */
  Promise promise[D];
  bool raised;      /* all have promised; from them: */
  byte step;        /* the lowest next step */
  Votes settled;    /* all its votes, or none */
  bool crashed;     /* or refused */
  bool reinit       /* all state is forgotten: step is then the highest next step */
}
#if COORDINATORS > 0
Attempt coordinators[COORDINATORS];
#endif

/* -- The machines ------------------------------------------------------------------------------ */

#define COLLECTING 0 /* kReducing, too */
#define VOTING 1
#define DISPUTED 2   /* kVoting, all have voted, on different terms */
#define COMMITTING 3
#define DEAD 4

typedef Machine {
  byte phase;
  byte generation = 1;
  byte promised;
  byte next_step;
  Votes votes; /* for next_step */
  Votes early; /* for the step after it */
  Votes last;  /* for the step before it */
  byte lineage = 1 /* the generation in which the state was made; constant without REINIT */
}
Machine machines[D];

/* -- What must hold, told apart from the machines' own knowledge ------------------------------- */

#define APPLY 1
#define SKIP 2
/* Generation and verdict of the first daemon that had one, as a vote; in each lineage. */
#ifdef REINIT
byte fate[STEPS * GENERATIONS];
byte made[GENERATIONS * D]; /* the lineage that a daemon voted with, by generation */
#define FATE(d, s) fate[(machines[d].lineage - 1) * STEPS + (s)]
#define MADE(d, i) made[(machines[d].generation - 1) * D + (i)]
#else
byte fate[STEPS];
#define FATE(d, s) fate[s]
#endif
byte thrown[STEPS];  /* generations, bits, in which some daemon threw its attempt away */
byte applied[D];     /* steps, bits */
byte crashes;

hidden byte i;       /* scratch, in one step of the model only */
hidden byte k;
hidden byte g;
hidden byte settled;
hidden byte odd;
hidden byte says;
hidden byte complete;
hidden byte overflow;
hidden byte real_overflow;
hidden byte real_odd;

inline Clear(target) {
  for (i : 0 .. D - 1) { target.by[i] = NONE }
}

inline Copy(target, source) {
  for (i : 0 .. D - 1) { target.by[i] = source.by[i] }
}

/* The claims about a verdict of daemon d, against all that was ever cast. */
inline CheckVerdict(d, verdict) {
  real_overflow = false;
  real_odd = 0;
  for (i : 0 .. D - 1) {
    /* No verdict without all votes of its own generation. */
    assert(CAST(machines[d].generation, machines[d].next_step, i) != NONE);
    real_overflow =
        real_overflow || CAST(machines[d].generation, machines[d].next_step, i) == OVERFLOW;
    real_odd = real_odd + (CAST(machines[d].generation, machines[d].next_step, i) == ODD);
#ifdef REINIT
    /* Old and new state take no step together. */
    assert(MADE(d, i) == machines[d].lineage);
#endif
    /* Who lost its state has no part in steps after the one in which it did. */
    assert(machines[i].phase != DEAD || machines[d].next_step <= machines[i].next_step)
  }
  /* No verdict unless all were told the same. */
  assert(real_odd == 0 || real_odd == D);
  /* Skip if and only if some vote says so. */
  assert((verdict == SKIP) == real_overflow);
  /* All verdicts of a step are one, in one generation. */
  assert(FATE(d, machines[d].next_step) == NONE ||
         FATE(d, machines[d].next_step) == Vote(machines[d].generation, verdict));
  /* Nobody has thrown away what is decided here. */
  assert((thrown[machines[d].next_step] >> machines[d].generation & 1) == 0);
  FATE(d, machines[d].next_step) = Vote(machines[d].generation, verdict)
}

inline Consume(d) {
  Copy(machines[d].last, machines[d].votes);
  Copy(machines[d].votes, machines[d].early);
  Clear(machines[d].early);
  machines[d].next_step++;
  machines[d].phase = COLLECTING
}

inline Decide(d) {
#ifdef BUG_LOCAL_VERDICT
  overflow = Says(machines[d].votes.by[d]) == OVERFLOW;
#endif
  if
  :: overflow ->
     CheckVerdict(d, SKIP);
     Consume(d)
  :: else ->
     CheckVerdict(d, APPLY);
     /* At most once. */
     assert((applied[d] >> machines[d].next_step & 1) == 0);
     applied[d] = applied[d] | 1 << machines[d].next_step;
     machines[d].phase = COMMITTING
  fi
}

/* With the votes of machine d: are they complete, how many are odd, does one say overflow? */
inline Count(d) {
  complete = true;
  overflow = false;
  odd = 0;
  for (i : 0 .. D - 1) {
    if
    :: machines[d].votes.by[i] == NONE ->
#ifdef BUG_MISSING_VOTE
       if
       :: complete && i != d -> complete = true
       :: else -> complete = false
       fi
#else
       complete = false
#endif
    :: else ->
       overflow = overflow || Says(machines[d].votes.by[i]) == OVERFLOW;
       odd = odd + (Says(machines[d].votes.by[i]) == ODD)
    fi
  }
}

#ifdef BUG_APPLY_TWICE
#define MayConclude(d) (machines[d].phase == VOTING || machines[d].phase == COMMITTING)
#else
#define MayConclude(d) (machines[d].phase == VOTING)
#endif

inline Conclude(d) {
  Count(d);
  if
  :: MayConclude(d) && complete ->
     if
#ifndef BUG_NO_TERMS_CHECK
     :: odd > 0 && odd < D -> machines[d].phase = DISPUTED
#endif
     :: else -> Decide(d)
     fi
  :: else
  fi
}

#ifdef BUG_VOTE_AFTER_PROMISE
#define Promised(d) false
#else
#define Promised(d) (machines[d].promised > machines[d].generation)
#endif

#define MayCast(d)                                                                     \
  (machines[d].phase == COLLECTING && machines[d].next_step < STEPS && !Promised(d))

inline Cast(d, what) {
  assert(CAST(machines[d].generation, machines[d].next_step, d) == NONE); /* a daemon votes once */
  for (i : 0 .. D - 1) {
    assert(machines[d].next_step <= machines[i].next_step + 1)  /* nobody is two steps ahead */
  }
  CAST(machines[d].generation, machines[d].next_step, d) = what;
#ifdef REINIT
  MADE(d, d) = machines[d].lineage;
#endif
  machines[d].votes.by[d] = Vote(machines[d].generation, what);
  machines[d].phase = VOTING;
  Conclude(d)
}

/* Daemon d learns the vote of daemon j for its next step, cast `back` generations ago: 0, but for a
 * bug. A duplicate or a vote for a step behind changes nothing. */
#define CastBack(d, j, s, back) CAST(machines[d].generation - (back), s, j)

#ifdef BUG_APPLY_TWICE
#define Again(d) (machines[d].phase == COMMITTING)
#else
#define Again(d) false
#endif

#define IsNews(d, j, back)                                                             \
  (machines[d].phase != DEAD && machines[d].next_step < STEPS && !Promised(d) &&            \
   (machines[d].votes.by[j] == NONE || Again(d)) &&                                    \
   CastBack(d, j, machines[d].next_step, back) != NONE)

inline OnVote(d, j, back) {
  machines[d].votes.by[j] =
      Vote(machines[d].generation - back, CastBack(d, j, machines[d].next_step, back));
  Conclude(d)
}

/* The same for the step after it. */
#define IsEarlyNews(d, j)                                                              \
  (machines[d].phase != DEAD && machines[d].next_step + 1 < STEPS && !Promised(d) &&        \
   machines[d].early.by[j] == NONE && CastBack(d, j, machines[d].next_step + 1, 0) != NONE)

inline OnEarlyVote(d, j) {
  machines[d].early.by[j] =
      Vote(machines[d].generation, CastBack(d, j, machines[d].next_step + 1, 0))
}

/* -- Raising the generation -------------------------------------------------------------------- */

#define MayPrepare(d, c)                                                               \
  (coordinators[c].generation > 0 && !coordinators[c].crashed &&                       \
   machines[d].phase != DEAD &&                                                        \
   coordinators[c].generation > machines[d].generation &&                              \
   coordinators[c].generation >= machines[d].promised)

#ifdef BUG_PROMISE_FORGETS
#define Keeps(d, vote) (GenerationOf(vote) == machines[d].generation)
#else
#define Keeps(d, vote) true
#endif

/* Votes of the generation that they were cast in: a commit may have outlived a raise. */
inline OnPrepare(d, c) {
  machines[d].promised = coordinators[c].generation
}

inline TakePromise(c, d) {
  coordinators[c].promise[d].next_step = machines[d].next_step;
#ifdef REINIT
  coordinators[c].promise[d].lineage = machines[d].lineage;
#endif
  for (i : 0 .. D - 1) {
    if
    :: Keeps(d, machines[d].votes.by[i]) ->
       coordinators[c].promise[d].now.by[i] = machines[d].votes.by[i]
    :: else
    fi;
    if
    :: Keeps(d, machines[d].last.by[i]) ->
       coordinators[c].promise[d].before.by[i] = machines[d].last.by[i]
    :: else
    fi
  }
  coordinators[c].promised = coordinators[c].promised | 1 << d
}

/* What daemon k promised to know of daemon i's vote for the lowest next step, in generation g. */
#define Told(c, k, i, g)                                                               \
  (coordinators[c].promise[k].next_step == coordinators[c].step &&                     \
       GenerationOf(coordinators[c].promise[k].now.by[i]) == g ||                      \
   coordinators[c].promise[k].next_step == coordinators[c].step + 1 &&                 \
       GenerationOf(coordinators[c].promise[k].before.by[i]) == g)

/* CheckOneLineage: a generation alone does not join different states. Where state is forgotten: all
 * go on at the highest next step. */
inline SettleLineages(c) {
  if
  :: coordinators[c].reinit ->
     for (k : 0 .. D - 1) {
       if
       :: coordinators[c].promise[k].next_step > coordinators[c].step ->
          coordinators[c].step = coordinators[c].promise[k].next_step
       :: else
       fi
     }
#ifndef BUG_MIXED_LINEAGES
  :: !coordinators[c].reinit ->
     for (k : 1 .. D - 1) {
       if
       :: coordinators[c].promise[k].lineage != coordinators[c].promise[0].lineage ->
          coordinators[c].crashed = true
       :: else
       fi
     }
#endif
  :: else
  fi;
  for (k : 0 .. D - 1) { coordinators[c].promise[k].lineage = 0 }
}

/* SettledVotes: all votes of the lowest next step, if they are complete in a generation. */
inline Settle(c) {
  coordinators[c].step = STEPS;
  for (k : 0 .. D - 1) {
    if
    :: coordinators[c].promise[k].next_step < coordinators[c].step ->
       coordinators[c].step = coordinators[c].promise[k].next_step
    :: else
    fi
  }
  settled = 0;
#ifdef REINIT
  SettleLineages(c);
#endif
  for (g : 1 .. GENERATIONS) {
    complete = coordinators[c].step < STEPS && !coordinators[c].reinit;
    for (i : 0 .. D - 1) {
      complete = complete && (Told(c, 0, i, g) || Told(c, 1, i, g) || Told(c, D - 1, i, g))
    }
    if
    :: complete ->
       assert(settled == 0); /* in one generation only */
       settled = g
    :: else
    fi
  }
#ifdef BUG_NO_SETTLE
  settled = 0;
#endif
  if
  :: settled > 0 ->
     for (i : 0 .. D - 1) {
       coordinators[c].settled.by[i] =
           Vote(settled, CAST(settled, coordinators[c].step, i))
     }
  :: else
  fi;
  for (k : 0 .. D - 1) { /* no longer needed: fewer states */
    coordinators[c].promise[k].next_step = 0;
    Clear(coordinators[c].promise[k].now);
    Clear(coordinators[c].promise[k].before)
  }
  coordinators[c].raised = true
}

#ifdef BUG_RAISE_BELOW_PROMISE
#define Outranked(d, c) false
#else
#define Outranked(d, c) (coordinators[c].generation < machines[d].promised)
#endif

#define MayRaise(d, c)                                                                 \
  (coordinators[c].raised && !coordinators[c].crashed && machines[d].phase != DEAD &&  \
   coordinators[c].generation > machines[d].generation && !Outranked(d, c))

/* The machine is made anew, with state that was made in this generation. */
inline OnReinit(d, c) {
  Clear(machines[d].votes);
  Clear(machines[d].early);
  Clear(machines[d].last);
  applied[d] = 0;
  machines[d].phase = COLLECTING;
  machines[d].next_step = coordinators[c].step;
  machines[d].lineage = coordinators[c].generation;
  machines[d].generation = coordinators[c].generation;
  machines[d].promised = coordinators[c].generation
}

inline OnGeneration(d, c) {
  for (i : 0 .. D - 1) {
    if
    :: coordinators[c].step == machines[d].next_step && machines[d].votes.by[i] == NONE &&
       GenerationOf(coordinators[c].settled.by[i]) == machines[d].generation ->
       machines[d].votes.by[i] = coordinators[c].settled.by[i]
    :: else
    fi
  }
  Conclude(d);
#ifndef BUG_KEEP_EARLY_VOTES
  Clear(machines[d].early);
#endif
  if
#ifndef BUG_RAISE_STOPS_COMMIT
  :: machines[d].phase == COMMITTING
#endif
  :: else ->
     if
     :: machines[d].next_step < STEPS ->
        /* Nobody has a verdict of what is thrown away here. */
        assert(FATE(d, machines[d].next_step) == NONE);
        thrown[machines[d].next_step] = thrown[machines[d].next_step] | 1 << machines[d].generation
     :: else
     fi;
     Clear(machines[d].votes);
     machines[d].phase = COLLECTING
  fi;
  machines[d].generation = coordinators[c].generation;
  machines[d].promised = coordinators[c].generation
}
