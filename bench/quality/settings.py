# SPDX-License-Identifier: Apache-2.0
"""Named groups of settings. A group is a list of (words, works): the words of spec.Spec and the total works at which
they run, most valuable first, so that a clock may cut the end off."""

HIGH, LOW, LEAN = 0.57, 0.44, 0.30      # today's default at budgets 0.3 and 0.1, and less than its dense calls cost
BOTH = (LOW, HIGH)
ALL = (LOW, HIGH, LEAN)

ERR = "sel=errq8m4 bud=layer lev=64/16 share=1"
FREE = "warm=0 l0=0"                                    # no dense step or layer by rule
AD = f"{ERR} {FREE} order=ad refresh=2 oref=2"          # the default before the group settle
WIDE = f"bud=layer share=1 {FREE} order=ad refresh=2 oref=2"
TODAY = ["base", FREE]


def swap(words, **new):
    """Words with some of them replaced or added."""
    kept = [w for w in words.split() if w.split("=")[0] not in new]
    return " ".join(kept + [f"{k}={v}" for k, v in new.items()])


def at(works, *settings):
    return [(s, works) for s in settings]


DECIDE = [
    *at(BOTH, "base"),
    *at(BOTH, swap(AD, order="kdm"), AD),
    # 1: how cheap may the order be
    *at((LOW,), swap(AD, asamp=64, aiter=4), swap(AD, asamp=128, aiter=4), swap(AD, asamp=128), swap(AD, asamp=512,
        aiter=12, amet=4352), swap(AD, amet=128), swap(AD, amet=0), swap(AD, acen=0), swap(AD, asamp=32, aiter=3,
        amet=128), swap(AD, leafk=8), swap(AD, leafk=4, leafq=4), swap(AD, leafq=64, leafk=64), swap(AD, order="adk")),
    # 2: where the output estimate comes from
    *at((LOW,), swap(AD, twice=1), swap(AD, osrc="block"), swap(AD, osrc="fine16"), swap(AD, osrc="prev"),
        swap(AD, osrc="block", zsrc="same"), swap(AD, osrc="fine16", zsrc="same")),
    # 3: blocks of other sizes, and group sizes
    *at((LOW,), swap(WIDE, sel="errq16m4", lev="128/32", bq=128, bk=128),
        swap(WIDE, sel="errq16m4", lev="128/16", bq=128, bk=128),
        swap(WIDE, sel="errq16m8", lev="128/16", bq=128, bk=128),
        swap(WIDE, sel="errq8m8", lev="128/16", bq=128, bk=128),
        swap(WIDE, sel="errq32m4", lev="128/16", bq=256, bk=128),
        swap(WIDE, sel="errq16m8", lev="128/16", bq=256, bk=128),
        swap(WIDE, sel="errq16m8", lev="128/32", bq=256, bk=128),
        swap(WIDE, sel="errq16m4", lev="64/16", bq=128, bk=64)),
    *at((LOW,), swap(AD, lev="64/8"), swap(AD, sel="errq8m8"), swap(AD, sel="errq4m4"), swap(AD, sel="errq4m8"),
        swap(AD, sel="errq16m4"), swap(AD, sel="errq16m8"), swap(AD, sel="errq8m2")),
    # 4: how often
    *at((LOW,), swap(AD, refresh=1, oref=1), swap(AD, refresh=2, oref=4), swap(AD, refresh=2, oref=0),
        swap(AD, refresh=4, oref=4), swap(AD, refresh=3, oref=3), swap(AD, refresh=1, oref=2),
        swap(AD, refresh=0, oref=0), swap(AD, refresh="0/1/2/4", oref="0/1/2/4"), swap(AD, share=0)),
    # 5: exact rows
    *at((LOW,), swap(AD, resid=4), swap(AD, resid=2),
        swap(WIDE, sel="errq16m8", lev="128/16", bq=128, bk=128, resid=4),
        swap(WIDE, sel="errq16m8", lev="128/16", bq=256, bk=128, resid=4),
        swap(WIDE, sel="errq16m8", lev="128/16", bq=256, bk=128, resid=8)),
    # the rest
    *at((LOW,), swap(AD, wt="head"), swap(AD, least=0), FREE, f"{ERR} {FREE} refresh=2"),
    *at((LEAN,), AD, FREE),
]

# What the group decide left open, around one candidate. Schedules are shares of the run: 0/1/2/4 of 8 steps.
EARLY = "0/.125/.25/.5"
CORE = f"bud=layer share=1 {FREE} order=ad refresh={EARLY} oref={EARLY} osrc=block amet=0"
NEW = f"sel=errq8m4 lev=64/8 leafq=4 leafk=4 resid=2 {CORE}"        # what the library does
NEW128 = f"sel=errq16m4 lev=128/16 bq=128 bk=128 resid=2 {CORE}"
NEW256 = swap(NEW128, bq=256)
SETTLE = [
    *at(BOTH, NEW),
    *at((LOW,), swap(NEW, resid=4), swap(NEW, resid=0), swap(NEW, lev="64/16"), swap(NEW, amet=512),
        swap(NEW, osrc="self"), swap(NEW, leafq=0, leafk=0), swap(NEW, refresh=2, oref=2),
        swap(NEW, refresh="0/1/3", oref="0/1/3"), swap(NEW, cent=1), swap(NEW, near=0.5)),
    *at((LOW,), NEW128, swap(NEW128, resid=4), NEW256, swap(NEW256, resid=4)),
    *at((HIGH,), swap(NEW, cent=1), swap(NEW, resid=4)),
]
MORE = [
    *at((HIGH,), swap(NEW, refresh=2, oref=2), NEW128, swap(NEW, resid=0)),
    *at((LOW,), swap(NEW128, leafq=4, leafk=4), swap(NEW, cent=0.7)),
]

PLAN = [
    *at(BOTH, "base", NEW, swap(NEW, plan="cell"), swap(NEW, plan="shape", shape="fit"), swap(NEW, plan="even")),
    *at((LEAN,), NEW, swap(NEW, plan="cell"), swap(NEW, plan="shape", shape="fit")),
    *at(BOTH, swap(NEW, warm=-1), swap(NEW, l0=1)),
]

REC = f"src=cached sel=errq8m4 bud=joint lev=64/16 {FREE}"
REC4 = swap(REC, resid=4)
REC2 = swap(REC, resid=2, lev="64/8")
RECORDED = [
    *at(BOTH, REC2, swap(REC2, P=32)), *at((LEAN,), REC2),
    *at(BOTH, swap(REC4, lev="64/8"), swap(REC4, lev="64/8", P=32), REC4, swap(REC4, lev="64/8", wt="cell"), REC,
        swap(REC4, lev="64/8", P=32, sel="err16"), swap(REC4, lev="64/8", wt="head")),
    *at(BOTH, "src=cached P=8"),
    *at((LOW,), swap(REC4, lev="64/8", P=2), swap(REC4, lev="64"), swap(REC4, lev="64/8", bud="layer")),
    *at((LEAN,), swap(REC4, lev="64/8", P=32)),
    # masks and orders of the clip itself, kept from its first steps
    *at(BOTH, swap(NEW, refresh=0, oref=0), swap(NEW, refresh="0/.125", oref="0/.125")),
    *at((LOW,), swap(NEW, refresh="0/.25", oref="0/.25"), f"{ERR} {FREE} refresh=0/.125"),
]

# A model that nothing was chosen on, other step counts and other guidance: called with their options
JUDGE = [
    *at(BOTH, "base", NEW, FREE, swap(REC4, lev="64/8"), swap(NEW, plan="shape", shape="fit")),
    *at(BOTH, swap(REC4, lev="64/8", P=32)),
]
OTHER = [*at((LOW,), "base", NEW, FREE), *at((HIGH,), "base", NEW)]

# In the order of their value, for one call under a clock
SECOND = [*SETTLE, *RECORDED[:3], *PLAN[:5], *RECORDED[3:6], *MORE, *PLAN[5:], *RECORDED[6:]]

# Other projects, re-implemented from their descriptions, each with the dense steps it comes with and without any:
# sparge  SpargeAttn's top-k entrance: softmax of mean-pooled blocks ranks them, as many in every row, no tail
# sol     Sol-Attn: pooled scores, a set by share of each row, what is skipped is replaced by its mean
# svg2, ear  see attend.clusters; losa  LoSA: exact masses of the last dense step, a set by share, kept for the clip
SPARGE, SOL = "sel=massq1m64 bud=uniform tail=0", "sel=massq1m64 bud=topp"
SVG2, EAR = "order=kmeans field=svg2 again=2", "order=kmeans field=ear again=2"
LOSA = "src=warm sel=mass64 bud=topp tail=0"
FIELD = [
    *at(BOTH, "base", NEW),
    *at(BOTH, SPARGE, f"{SPARGE} {FREE}", SOL, f"{SOL} {FREE}", SVG2, f"{SVG2} {FREE}", EAR, f"{EAR} {FREE}"),
    *at(BOTH, f"{LOSA} l0=0", f"{LOSA} warm=1 l0=0", f"{LOSA} warm=1 l0=0 bk=32"),
    *at((LEAN,), NEW, f"{SPARGE} {FREE}", f"{SOL} {FREE}", f"{SVG2} {FREE}", f"{EAR} {FREE}", f"{LOSA} warm=1 l0=0"),
]

# One idea after the other, then together
TABLE = [
    *at(BOTH, "base"), *at(ALL, FREE),
    *at(BOTH, "sel=errq8m4 bud=layer", "sel=errq8m4 bud=layer lev=64/16"),
    *at(ALL, f"sel=errq8m4 bud=layer lev=64/16 {FREE}", f"{ERR} {FREE} refresh=2", AD, swap(NEW, resid=0), NEW),
    *at(ALL, swap(REC4, lev="64/8", P=32)), *at(BOTH, "src=cached"),
]

# mc  MC-Sparse (arXiv 2610.06801): exact masses of small groups of keys in the last of the dense steps in front, and
#     what each branch's sparse call lacks there, in bf16, for the rest of the clip
MC = "src=warm sel=mass64 bk=16 bud=topp tail=0 l0=0 carry=warm cown=1 cbits=16"

# Carried differences: docs/quality.md. Every group has its number of steps.
SIX, FIVE, FOUR = "0/.1/.2/.35/.55/.75", "0/.125/.25/.5/.75", "0/.125/.3/.6"
CARRY = swap(NEW, refresh="anchor", oref="anchor", carry=SIX).replace(" resid=2", "")
CARRY128 = swap(NEW128, refresh="anchor", oref="anchor", carry=SIX).replace(" resid=2", "")
THIN, THINNER = 0.20, 0.12
HALF = "/".join(f"{i / 50:g}" for i in range(11, 46, 2))        # every second step from a fifth to nine tenths
CARRY50 = [
    *at((THIN,), NEW, CARRY),
    # where anchors go
    *at((THIN,), swap(CARRY, carry=FIVE), swap(CARRY, carry="out6"), swap(CARRY, carry="qk6"), swap(CARRY, cstag=4),
        swap(CARRY, carry="0/.06/.12/.2/.3/.45/.6/.8"), swap(CARRY, carry="0/.17/.34/.5/.67/.84"),
        swap(CARRY, carry="0/.04/.1/.2/.35/.6"), swap(CARRY, carry="0/.25/.45/.6/.75/.88")),
    # what to choose; which tail
    *at((THIN, THINNER), swap(CARRY, csel="err64"), swap(CARRY, lev="64")),
    *at((THINNER,), CARRY, NEW, swap(CARRY, carry=FOUR), swap(CARRY, carry=FIVE)),
    *at((THIN,), swap(CARRY128, leafq=4, leafk=4), swap(CARRY128, lev="128"), swap(CARRY, bk=128, lev="128/16"),
        swap(CARRY, bq=128, sel="errq16m4"), swap(CARRY, lev="64/16"), swap(CARRY, least=0),
        swap(CARRY, lev="64", sel="errq8m8"), swap(CARRY, amet=512)),
    # densities
    *at((THIN,), swap(CARRY, plan="cell"), swap(CARRY, plan="shape", shape="9/2/0"),
        swap(CARRY, plan="shape", shape="9/-2/0"), swap(CARRY, plan="shape", shape="9/0/2"),
        swap(CARRY, plan="shape", shape="9/0/-2")),
    *at((THINNER,), swap(CARRY, plan="cell")),
    # the field, and one dense warm-up
    *at((LEAN,), NEW, CARRY, MC, f"{MC} warm=5"),
    *at((LOW,), MC, NEW, CARRY),
    # a step cache: dense with it, then both at equal work
    *at((1.0,), f"warm=0 l0=99 skip={HALF}"), *at((THIN, THINNER), swap(CARRY, skip=HALF)),
    *at((THIN,), swap(NEW, skip=HALF), swap(CARRY, cbits=32), swap(CARRY, cbits=16), swap(CARRY, cown=1, share=0),
        swap(CARRY, least=0, lev="64"), swap(CARRY, sel="errq4m4"), swap(CARRY, cstag=8)),
    *at((LEAN,), f"{SOL} {FREE}", f"{SPARGE} {FREE}", f"{LOSA} warm=5 l0=0"),
]
CARRY25 = [
    *at((THIN, LEAN, LOW), NEW, CARRY, swap(CARRY, carry=FIVE)), *at((THIN, LEAN), swap(CARRY, carry=FOUR)),
    *at((THIN,), swap(CARRY, carry="0/.04/.1/.2/.35/.6"), swap(CARRY, carry="0/.08/.16/.24/.36/.48/.64/.8"),
        swap(CARRY, lev="64"), swap(CARRY, csel="err64"), swap(CARRY, cstag=4)),
    *at((HIGH,), NEW, CARRY),
]
CARRY8 = [
    *at((LOW,), NEW, swap(CARRY, carry="0/.25/.5"), swap(CARRY, carry="0/.25/.5", plan="cell")),
    *at((LOW, LEAN, HIGH), NEW, swap(CARRY, carry="0/.25/.5"), swap(CARRY, carry="0/.25"), swap(CARRY, carry="0"),
        swap(CARRY, carry="0/.125/.375"), swap(CARRY, carry="0/.25/.5/.75"), swap(CARRY, carry="0/.5")),
    *at((LOW,), swap(CARRY, carry="0/.25/.5", lev="64"),
        swap(CARRY, carry="0/.25/.5", csel="err64"), swap(CARRY, carry="0/.125/.25/.375/.5/.75"),
        swap(CARRY, carry="out2"), f"{MC} warm=2", f"{MC} warm=1"),
    *at((THIN,), NEW, swap(CARRY, carry="0/.25"), swap(CARRY, carry="0")),
]
CARRY4 = [
    *at((LOW, HIGH, LEAN), NEW, swap(CARRY, carry="0"), swap(CARRY, carry="0/.5"), swap(CARRY, carry="0/.25")),
    *at((HIGH,), swap(CARRY, carry="0/.25/.5")),
]
# One guidance branch: --guidance 1
CARRY_ONE = [
    *at((LEAN, THIN), NEW, swap(CARRY, carry=FOUR), swap(CARRY, carry="0/.2/.5")),
    *at((LEAN, LOW), swap(CARRY, carry=FIVE)), *at((LOW,), NEW, swap(CARRY, carry=FOUR), swap(CARRY, carry=SIX)),
]
# A model of true size, blocks of 128
B128 = "bq=128 bk=128"
SPARGE128, SOL128 = (swap(f"{x} {FREE} {B128}", sel="massq1m128") for x in (SPARGE, SOL))
BIG = [
    *at((LEAN,), NEW128, CARRY128), *at((THIN,), CARRY128, NEW128), *at((LOW,), NEW128, B128),
    *at((LEAN,), f"{swap(MC, sel='mass128')} bq=128 warm=3", f"{B128} {FREE}", SOL128, SPARGE128),
    *at((LOW,), f"{swap(MC, sel='mass128')} bq=128", CARRY128), *at((THINNER,), swap(CARRY128, carry=FOUR)),
    *at((THIN,), swap(CARRY128, lev="128"), swap(CARRY128, leafq=4, leafk=4)), *at((HIGH,), NEW128, B128, CARRY128),
    *at((LEAN,), f"{EAR} {FREE} {B128}", f"{SVG2} {FREE} {B128}"),
]

GROUPS = {"decide": DECIDE, "settle": SETTLE + MORE, "plan": PLAN, "recorded": RECORDED, "judge": JUDGE, "other": OTHER,
          "second": SECOND, "field": FIELD, "table": TABLE,
          "carry50": CARRY50, "carry25": CARRY25, "carry8": CARRY8, "carry4": CARRY4, "one": CARRY_ONE, "big": BIG}
