# SPDX-License-Identifier: Apache-2.0
"""Reads a pickle that holds dictionaries of numpy arrays, and runs nothing of it.

A pickle is a program: Python's reader imports whatever it names and calls that. This reader knows the few instructions
that dictionaries, arrays, numbers and text are made of. Arrays and their types are not numpy's but Array and the word
'f4' of this file, so neither numpy nor anything else is imported or called. Whatever else a file asks for is refused
by name. Every length is compared with the bytes that are there before memory is taken for it, and the instructions are
counted.

Arrays are little-endian f32 in C order; the protocol is 3 or 4."""
import math
import pickletools
import struct

# What numpy names in its pickles; numpy 2 has moved the first.
ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): "array",
    ("numpy._core.multiarray", "_reconstruct"): "array",
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
}
FIXED = {b"N": None, b"\x88": True, b"\x89": False}
# Instructions with a number, a text or bytes behind them, and how long that or its length is.
NUMBERS = {b"K": "<B", b"M": "<H", b"J": "<i"}
TEXTS = {b"\x8c": "<B", b"X": "<I", b"\x8d": "<Q"}
BYTES = {b"C": "<B", b"B": "<I", b"\x8e": "<Q"}
PUT, GET = {b"q": "<B", b"r": "<I"}, {b"h": "<B", b"j": "<I"}
TUPLES = {b")": 0, b"\x85": 1, b"\x86": 2, b"\x87": 3}
MARK = object()
MOST = 100_000              # instructions; a network of 32 arrays has 850


class Refused(ValueError):
    """The file asks for something else than dictionaries of arrays, or is damaged."""


class Word:
    """One of the values of ALLOWED."""

    def __init__(self, name):
        self.name = name


class Type:
    """A numpy dtype; order is None until its state was read."""

    def __init__(self, name):
        self.name, self.order = name, None


class Array:
    """shape, a tuple of int, and data, bytes of little-endian f32 in C order; both None until its state was read."""

    def __init__(self):
        self.shape = self.data = None


def short(text):
    """Text of a file in a message: printable and not long."""
    plain = ascii(text)[1:-1]
    return plain if len(plain) <= 80 else plain[:77] + "..."


def kind(x):
    return "nothing" if x is None else type(x).__name__.lower()


class Reader:
    def __init__(self, data):
        self.data, self.at, self.start = memoryview(data), 0, 0
        self.stack, self.memo = [], {}

    def fail(self, text):
        raise Refused(f"byte {self.start}: {text}")

    # ---- the bytes

    def take(self, n):
        if n > len(self.data) - self.at:
            self.fail(f"the file ends early: {n} bytes are announced, {len(self.data) - self.at} are left")
        self.at += n
        return self.data[self.at - n:self.at]

    def number(self, form):
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self):
        end = bytes(self.data[self.at:self.at + 500]).find(b"\n")
        if end < 0:
            self.fail("a name without an end")
        return bytes(self.take(end + 1))[:-1].decode("utf-8", "replace")

    def text(self, n):
        try:
            return str(self.take(n), "utf-8")
        except UnicodeDecodeError:
            return self.fail("a text is not UTF-8")

    # ---- the stack

    def pop(self):
        if not self.stack or self.stack[-1] is MARK:
            self.fail("the file is damaged: a value is missing")
        return self.stack.pop()

    def since_mark(self):
        for i in range(len(self.stack) - 1, -1, -1):
            if self.stack[i] is MARK:
                out = self.stack[i + 1:]
                del self.stack[i:]
                return out
        return self.fail("the file is damaged: a mark is missing")

    def keep(self, i):
        if not self.stack or self.stack[-1] is MARK:
            self.fail("the file is damaged: a value is missing")
        self.memo[i] = self.stack[-1]

    def kept(self, i):
        if i not in self.memo:
            self.fail("the file is damaged: it uses a value that it did not make")
        return self.memo[i]

    # ---- what values are made of

    def name(self, module, name):
        word = ALLOWED.get((module, name))
        if word is None:
            self.fail(f"refused: the file asks for {short(module)}.{short(name)}, which is no numpy array")
        return Word(word)

    def call(self, what, given):
        if type(what) is not Word or type(given) is not tuple:
            self.fail(f"refused: the file calls a {kind(what)}")
        if what.name == "array" and len(given) == 3 and type(given[0]) is Word and given[0].name == "ndarray":
            return Array()
        if what.name == "dtype" and len(given) == 3 and type(given[0]) is str:
            if given[0] != "f4":
                self.fail(f"an array of type {short(given[0])}, expected f4")
            return Type(given[0])
        return self.fail(f"refused: the file calls {what.name} in another way than numpy does")

    def build(self, x, state):
        if type(state) is not tuple or type(x) not in (Type, Array):
            self.fail(f"refused: the file sets the state of a {kind(x)}")
        if type(x) is Type:
            if len(state) != 8 or state[1] != "<" or any(v is not None for v in state[2:5]):
                self.fail("a type that is not little-endian f4")
            x.order = "<"
            return
        if len(state) != 5:
            self.fail("an array whose state is not version, shape, type, order and data")
        _, shape, of, fortran, data = state
        if type(of) is not Type or of.order is None or fortran is not False or type(data) is not memoryview:
            self.fail("an array that is not plain little-endian f4 in C order")
        if type(shape) is not tuple or len(shape) > 8 or any(type(n) is not int or n < 0 for n in shape):
            self.fail("an array without a shape")
        if 4 * math.prod(shape) != len(data):
            self.fail(f"an array of shape {list(shape)} with {len(data)} bytes, expected {4 * math.prod(shape)}")
        x.shape, x.data = shape, data

    def items(self, pairs):
        where = self.stack[-1] if self.stack else None
        if type(where) is not dict or len(pairs) % 2:
            self.fail("the file is damaged: entries without a dictionary")
        for key, value in zip(pairs[::2], pairs[1::2]):
            if type(key) is not str:
                self.fail(f"a dictionary with a {kind(key)} as name, expected text")
            where[key] = value

    # ---- the program

    def push(self, op):
        """Instructions that add a value. 1 if op is one of them."""
        if op in FIXED:
            self.stack.append(FIXED[op])
        elif op in NUMBERS:
            self.stack.append(self.number(NUMBERS[op]))
        elif op in TEXTS:
            self.stack.append(self.text(self.number(TEXTS[op])))
        elif op in BYTES:
            self.stack.append(self.take(self.number(BYTES[op])))
        elif op in GET:
            self.stack.append(self.kept(self.number(GET[op])))
        elif op in TUPLES:
            self.stack.append(tuple([self.pop() for _ in range(TUPLES[op])][::-1]))
        elif op == b"}":
            self.stack.append({})
        elif op == b"(":
            self.stack.append(MARK)
        elif op == b"c":
            module = self.line()
            self.stack.append(self.name(module, self.line()))
        else:
            return 0
        return 1

    def change(self, op):
        """Instructions that work on values. 1 if op is one of them."""
        if op in PUT:
            self.keep(self.number(PUT[op]))
        elif op == b"\x94":
            self.keep(len(self.memo))
        elif op == b"t":
            self.stack.append(tuple(self.since_mark()))
        elif op == b"s":
            value = self.pop()
            self.items([self.pop(), value])
        elif op == b"u":
            self.items(self.since_mark())
        elif op == b"R":
            given = self.pop()
            self.stack.append(self.call(self.pop(), given))
        elif op == b"b":
            state = self.pop()
            self.build(self.stack[-1] if self.stack else None, state)
        elif op == b"\x93":
            name, module = self.pop(), self.pop()
            if type(name) is not str or type(module) is not str:
                self.fail("refused: the file asks for something that is no name")
            self.stack.append(self.name(module, name))
        else:
            return 0
        return 1

    def run(self):
        if bytes(self.data[:2]) not in (b"\x80\x03", b"\x80\x04"):
            self.fail("this is no pickle of protocol 3 or 4")
        self.at = 2
        for _ in range(MOST):
            self.start = self.at
            op = bytes(self.take(1))
            if op == b"\x95":
                self.number("<Q")                                   # the length of a frame, of no use here
            elif op == b".":
                return self.pop()
            elif not self.push(op) and not self.change(op):
                known = pickletools.code2op.get(op.decode("latin-1"))
                self.fail("refused: instruction " + (known.name if known else f"0x{op[0]:02x}") +
                          ", which arrays do not need")
        return self.fail(f"refused: more than {MOST} instructions")


def load(data):
    """The dictionary in a pickle: {text: Array, or a dictionary of the same kind}. Raises Refused."""
    found = Reader(data).run()
    if type(found) is not dict:
        raise Refused(f"the file holds a {kind(found)}, expected a dictionary of arrays")
    return found
