# SPDX-License-Identifier: Apache-2.0
"""What one run of the study is: a setting, written as words (`sel=errq8m4 bud=layer lev=64/16 work=0.44`)."""
import math
import re
from dataclasses import dataclass, fields, replace

SEL = re.compile(r"^(mass|err)(q?)(\d+)(?:m(\d+))?$")
DRIFT = re.compile(r"^(qk|out)(\d+)$")
KD = re.compile(r"^kd(k?)(m?)(\d*)$")


@dataclass(frozen=True)
class Spec:
    """Every field is a word of a setting. The defaults are the project's default before this study ("base")."""
    work: float = 0.57      # attention work of the whole clip as a share of dense, everything counted
    sel: str = "mass4"      # score of a block: mass or err, [q] S queries a block (q: means), [m M] means of M keys
    src: str = "online"     # online | cached (recorded on other prompts) | warm (made in the last dense step, kept)
    P: int = 8              # prompts that recorded things come from
    bud: str = "entropy"    # who shares a budget: entropy uniform (rows) layer (one threshold) topp | joint (cached)
    plan: str = "flat"      # density of each layer and step: flat | cell (by sensitivity) | even (without) | shape
    shape: str = ""         # plan=shape: decay/sigma/depth, see plans.shape_curves; fit: as fitted to plan=cell
    tail: int = -1          # tokens that one mean of the tail stands for; -1: a block; 0: no tail
    lev: str = ""           # levels of the tail, tokens a mean: "64/16"; chosen by error and cost
    least: int = 1          # exact blocks a row at least (levels)
    osrc: str = "self"      # output estimate inside err: self | fineG (means of G keys) | block | prev (last step's)
    zsrc: str = "own"       # normaliser inside err: own (same pass as the weights) | same (as osrc; block or fineG)
    twice: int = 0          # 1: a fused kernel that makes the pass over the means twice; counted so
    resid: int = 0          # exact rows a query block; their mean error, shrunk, is added to the others
    near: float = 0.0       # resid: share of the difference between a row's nearest exact row and that mean, added too
    cent: float = 0.0       # err: this share of the block's mean error is left out, because exact rows remove it
    bq: int = 64
    bk: int = 64
    order: str = "hilbert"  # hilbert | raster | kd.. (full, see orders.make) | ad, adk (sampled) | kmeans
    asamp: int = 256        # ad: tokens a node that directions are taken from
    aiter: int = 6          # ad: power iterations a node
    amet: int = 512         # ad: tokens that the metric of the other side is taken from; 0: no metric
    acen: int = 1           # ad: 1: metric of the queries from keys minus their mean (softmax ignores it)
    leafq: int = 0          # tokens of a piece of queries that is not cut further; 0: queries of one mean
    leafk: int = 0          # the same of keys; 0: tokens of the finest level
    warm: int = -1          # dense steps in front; -1: a fifth of the steps, rounded up
    l0: int = 1             # dense layers in front
    refresh: str = "1"      # masks are made anew every so many sparse steps; 0: once; "0/1/4": in these;
                            # "0/.25/.5": in front of these shares of the sparse steps; anchor: at anchors
    oref: str = "1"         # orders likewise; new orders always bring new masks
    share: int = 0          # 1: the unguided branch uses masks and orders of the guided one
    wt: str = "none"        # errors of heads weighted by gate and output projection: none | head
    field: str = ""         # order=kmeans: svg2 | ear
    rounds: int = 6         # order=kmeans: rounds of k-means
    again: int = 0          # order=kmeans: rounds in later steps, which start from the last centroids; 0: anew
    carry: str = ""         # anchors, steps with a dense call beside the sparse one, whose difference is added later: a
                            # schedule; qk6, out6: where q and k, or the output, drifted, six a layer on average; warm:
                            # the last of the dense steps in front
    cown: int = 0           # carry: 0: d of the guided branch serves both; 1: each branch runs dense and has its own
    cbits: int = 8          # bits of d: 8 (E4M3, a scale per token and head), 16 (bf16), 32
    cstag: int = 0          # layers take turns: their anchors are spread over so many places before those of carry
    csel: str = ""          # score at anchors; the dense call makes its products, so they cost nothing
    skip: str = ""          # schedule of steps that a step cache leaves out: the last velocity is used again

    def label(self):
        """The words that differ from the defaults; work is named apart."""
        base = Spec()
        words = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)
                 if f.name != "work" and getattr(self, f.name) != getattr(base, f.name)]
        return " ".join(words) or "base"

    @staticmethod
    def parse(text, **more):
        kinds = {f.name: type(f.default) for f in fields(Spec)}
        values = {}
        for word in filter(None, re.split(r"[,\s]+", text)):
            if word == "base":
                continue
            name, _, value = word.partition("=")
            if name not in kinds or not value:
                raise ValueError(f"no such word of a setting: {word}")
            values[name] = kinds[name](value)
        spec = Spec(**{**values, **more})
        spec.check()
        return spec

    def check(self):
        self.score()
        if self.src != "online" and self.order not in ("hilbert", "raster"):
            raise ValueError(f"masks of src={self.src} need a fixed order, not order={self.order}")
        if self.lev and self.score()[0] != "err":
            raise ValueError(f"levels are chosen by error, not by sel={self.sel}")
        if self.lev and self.score()[3] >= min(self.sizes()):
            raise ValueError(f"sel={self.sel} cannot see the error of means of {min(self.sizes())} tokens")
        if self.bud == "joint" and (self.src != "cached" or not self.lev):
            raise ValueError("bud=joint is one price for all recorded levels: src=cached and lev=.. are needed")
        if any(self.bk % s for s in self.sizes() if s):
            raise ValueError(f"means of {self.sizes()} tokens do not divide blocks of {self.bk}")
        if (self.near or self.cent) and not self.resid:
            raise ValueError("near and cent need exact rows: resid=4")
        if self.carry and (self.resid or self.order == "kmeans"):
            raise ValueError("carry is simulated without exact rows (resid) and clusters")
        if "anchor" in (self.refresh, self.oref) and not self.carry:
            raise ValueError("refresh=anchor and oref=anchor need anchors: carry=0/.25")
        if (self.carry == "warm") != (self.src == "warm" and bool(self.carry)):
            raise ValueError("carry=warm and src=warm with carry belong together: masks and d of one dense step")
        if self.csel and not (self.carry and (self.share or self.cown)):
            raise ValueError("csel needs anchors, and a dense call for each mask: carry=.. and share=1 or cown=1")
        if self.cbits not in (8, 16, 32):
            raise ValueError(f"d has 8, 16 or 32 bits, not {self.cbits}")
        if self.zsrc == "same" and self.osrc in ("self", "prev"):
            raise ValueError(f"zsrc=same needs osrc=block or osrc=fineG, not osrc={self.osrc}")

    def resolved(self, steps):
        """The same with dense steps and schedules as numbers of steps of a run of this length. What is due in a step
        that is left out is due in the next one."""
        warm = math.ceil(0.2 * steps - 1e-9) if self.warm < 0 else self.warm

        def numbers(text):
            if "." not in text:
                return text
            return "/".join(map(str, sorted({int(float(x) * (steps - warm) + 1e-9) for x in text.split("/")})))
        skip = numbers(self.skip)
        out = {int(x) for x in skip.split("/")} if skip else set()

        def computed(text):
            if not out or "/" not in text:
                return text
            later = [next((i for i in range(int(x), steps) if i not in out), None) for x in text.split("/")]
            return "/".join(map(str, sorted({i for i in later if i is not None})))
        return replace(self, warm=warm, skip=skip, **{name: computed(numbers(getattr(self, name)))
                                                      for name in ("refresh", "oref", "carry")})

    def skips(self, step):
        """Is this step left out? For a resolved setting."""
        return bool(self.skip) and str(step - self.warm) in self.skip.split("/")

    def score(self):
        """(kind, queries are means, queries a block, keys a mean)."""
        m = SEL.match(self.sel)
        if not m:
            raise ValueError(f"no such score: {self.sel}")
        return m[1], bool(m[2]), int(m[3]), max(1, int(m[4] or 1))

    def sizes(self):
        """Tokens a mean of every level of the tail, coarse to fine; [0]: no tail."""
        if self.lev:
            return [int(x) for x in self.lev.split("/")]
        return [self.bk if self.tail < 0 else self.tail]

    def leaves(self):
        """Tokens of the smallest pieces that an order cuts: queries, keys. The full order cuts down to 8."""
        if KD.match(self.order):
            return self.leafq or 8, self.leafk or 8
        _, mean, s, _ = self.score()
        fine = [x for x in self.sizes() if x]
        return self.leafq or (max(1, self.bq // s) if mean else self.bq), self.leafk or min(fine + [self.bk])

    def adaptive(self):
        return self.order[:2] in ("kd", "ad")

    def is_dense(self, step, layer):
        return step < self.warm or layer < self.l0


def due(text, i):
    """Is something with this schedule made in the i-th sparse step?"""
    if "/" in text:
        return str(i) in text.split("/")
    return i == 0 if int(text) == 0 else i % int(text) == 0
