/* How the daemons of a run agree on a step: vote, verdict, commit, and raising the generation.
 *
 * A model of server/step/step_machine_vote.cc and of what surrounds it in step_machine.cc. The
 * machines and the claims are in machine.pml; here is who may do what, when. check_model.py knows
 * how to run it, and lists the bounds of each search.
 *
 * What it leaves out, and why that loses nothing:
 * - Trainers. A daemon may at any time find its gradients complete (fine, with an overflow, or told
 *   on other terms than elsewhere) or never: more than any trainers could bring about. A trainers'
 *   Skip is a vote for a skip, like an overflow. Numbers in votes: all but "is there an overflow".
 * - The network. A vote, a prepare, a raise that was once sent may reach any daemon at any time,
 *   any number of times, in any order, or never: `cast` and `coordinators` are the network. That is
 *   loss, duplication, reordering and unbounded delay at once, and passing votes on as well.
 * - The coordinator's crash. It may stop between any two messages, and others may have begun before
 *   it stopped, with the same generation or another; what it sent may still arrive after its end.
 *
 * With LIVE the network helps nobody: a vote travels only while its daemon still tells it (its step
 * is in flight), or in the answer to another's; prepare and raise only while their coordinator
 * lives. All may crash but the last. A lost message is one that has not come yet, since it is told
 * again. Every event changes something for good, so runs are finite, and a run in which all that
 * can go on happening does happen ends: it must end with all steps consumed.
 *
 * With REINIT an attempt to raise the generation may also make all state anew, and any of them may
 * break off half way. A daemon without its state is not there, nor is the way of the new state.
 *
 * Bounds: D daemons, STEPS steps, COORDINATORS attempts to raise the generation, values FINE,
 * OVERFLOW and (TERMS) ODD; CRASHES daemons that lose their state for good. Searched: two daemons
 * with 3 steps and 2 raises, 2 steps and 3 raises, 2 steps with 2 raises and a crash; three with 3
 * steps, 2 steps and 2 raises, 2 steps with a raise and a crash. With REINIT: two daemons with 2
 * steps and 2 raises or one and 3, three with one step and 2. A restore is a re-initialization with
 * other values. Not here are a machine that was stopped or has failed, and what trainers are told.
 *
 * BUG_*: a rule taken out. The checker must notice each.
 */
#ifndef D
#define D 2
#endif
#ifndef STEPS
#define STEPS 2
#endif
#ifndef COORDINATORS
#define COORDINATORS 2
#endif
#ifndef CRASHES
#define CRASHES 0
#endif
#define GENERATIONS (COORDINATORS + 1) /* 1: where all start */

#include "machine.pml"

/* -- Who does what, when ----------------------------------------------------------------------- */

#ifdef LIVE

/* Daemons tell their votes as long as the step is in flight, */
#define Telling(d) (machines[d].phase == VOTING || machines[d].phase == DISPUTED)
#define SameGeneration(d, j) (machines[j].generation == machines[d].generation)
#define IsTold(d, j)                                                                   \
  (Telling(j) && SameGeneration(d, j) && machines[j].next_step == machines[d].next_step &&       \
   IsNews(d, j, 0))
#define IsToldEarly(d, j)                                                              \
  (Telling(j) && SameGeneration(d, j) && machines[j].next_step == machines[d].next_step + 1 &&   \
   IsEarlyNews(d, j))
/* and are answered with the votes known there, of the step in flight or the last consumed. */
#ifdef BUG_NO_PASSING_ON
#define IsAnswered(d, k, j) false
#else
#define IsAnswered(d, k, j)                                                            \
  (Telling(d) && machines[k].phase != DEAD && SameGeneration(d, k) && IsNews(d, j, 0) && \
   (machines[k].next_step == machines[d].next_step && !Promised(k) &&                            \
        GenerationOf(machines[k].votes.by[j]) == machines[d].generation ||             \
    machines[k].next_step == machines[d].next_step + 1 &&                                        \
        GenerationOf(machines[k].last.by[j]) == machines[d].generation))
#endif
#define VOTES_OF(j)                                                                    \
  :: d_step { IsTold(me, j) -> OnVote(me, j, 0) }                                      \
  :: d_step { IsToldEarly(me, j) -> OnEarlyVote(me, j) }                               \
  :: d_step { IsAnswered(me, 0, j) || IsAnswered(me, 1, j) || IsAnswered(me, D - 1, j) -> \
              OnVote(me, j, 0) }

#else

#ifdef BUG_NO_GENERATION_CHECK
#define STALE_VOTES_OF(j)                                                              \
  :: d_step { machines[me].generation > 1 && IsNews(me, j, 1) -> OnVote(me, j, 1) }
#else
#define STALE_VOTES_OF(j)
#endif
#define VOTES_OF(j)                                                                    \
  :: d_step { IsNews(me, j, 0) -> OnVote(me, j, 0) }                                   \
  :: d_step { IsEarlyNews(me, j) -> OnEarlyVote(me, j) }                               \
  STALE_VOTES_OF(j)

#endif

#ifdef REINIT
#define REINITIALIZED_BY(c)                                                            \
  :: d_step { MayRaise(me, c) && coordinators[c].reinit -> OnReinit(me, c) }
#else
#define REINITIALIZED_BY(c)
#endif

/* A promise whose answer is lost; one that arrives; a raise. */
#define RAISED_BY(c)                                                                   \
  :: d_step { MayPrepare(me, c) && machines[me].promised < coordinators[c].generation -> \
              OnPrepare(me, c) }                                                       \
  :: d_step { MayPrepare(me, c) && (coordinators[c].promised >> me & 1) == 0 ->        \
              OnPrepare(me, c); TakePromise(c, me) }                                   \
  :: d_step { MayRaise(me, c) && !coordinators[c].reinit -> OnGeneration(me, c) }      \
  REINITIALIZED_BY(c)

active [D] proctype Daemon() {
  byte me = _pid;
end:
  do
  :: d_step { MayCast(me) -> Cast(me, FINE) }
#ifndef NO_OVERFLOW
  :: d_step { MayCast(me) -> Cast(me, OVERFLOW) }
#endif
#ifdef TERMS
  :: d_step { MayCast(me) -> Cast(me, ODD) }
#endif
  VOTES_OF(0)
  VOTES_OF(1)
#if D > 2
  VOTES_OF(2)
#endif
  :: d_step { machines[me].phase == COMMITTING -> Consume(me) }
#if COORDINATORS > 0
  RAISED_BY(0)
#endif
#if COORDINATORS > 1
  RAISED_BY(1)
#endif
#if COORDINATORS > 2
  RAISED_BY(2)
#endif
#if CRASHES > 0
  :: d_step { machines[me].phase != DEAD && crashes < CRASHES ->
              machines[me].phase = DEAD; crashes++ }
#endif
  od
}

#if COORDINATORS > 0
#ifdef BUG_NOBODY_STARTS_OVER
#define MayCrash(c) true
#else
#define MayCrash(c) ((c) < COORDINATORS - 1)
#endif

/* Its generation is its number plus 2, above that of all before it, or one below: the same as
 * another's, or too low. */
active [COORDINATORS] proctype Coordinator() {
  byte me = _pid - D;
end:
  do
  :: d_step { coordinators[me].generation == 0 -> coordinators[me].generation = me + 2 }
#ifdef REINIT
  /* Numbers are its own: nobody takes one order for another. */
  :: d_step { coordinators[me].generation == 0 -> coordinators[me].generation = me + 2;
              coordinators[me].reinit = true }
#elif !defined(LIVE)
  :: d_step { coordinators[me].generation == 0 && me > 0 -> coordinators[me].generation = me + 1 }
#else
  /* A coordinator that crashes takes its raise with it, unless some daemon has it. */
  :: d_step { coordinators[me].generation > 0 && !coordinators[me].crashed && MayCrash(me) ->
              coordinators[me].crashed = true }
#endif
  :: d_step { coordinators[me].promised == (1 << D) - 1 && !coordinators[me].raised -> Settle(me) }
  od
}
#endif

#ifdef LIVE
#define Done(d) (machines[d].next_step == STEPS)
#define AllDone (Done(0) && Done(1) && Done(D - 1))
ltl progress { <> AllDone }
#endif
