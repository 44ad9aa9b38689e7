# SPDX-License-Identifier: Apache-2.0
"""Prompts of the study: the judged ones (two seeds each) and others, for plans and recordings."""
EVAL = [
    "a red ball rolls to the right over a blue floor",
    "a large yellow star spins in place over a purple background",
    "a white square moves to the left over a green striped background",
    "a small orange triangle moves up over a black background",
    "a large green ring grows over a white checkered background",
    "a large blue cross moves to the right over a yellow floor",
    "a purple ball moves in a circle over an orange gradient background",
    "a large black square shrinks over a red dotted background",
]
OTHERS = [
    "a small white ball rolls to the left behind a large red triangle over a blue background",
    "a red star falls down and a small blue ring spins over a white background",
    "a yellow triangle swings from side to side over a black striped background",
    "a green cross moves to the right in front of a large orange ball over a purple floor",
    "a blue star bounces up and down over a green floor",
    "a large white ring moves to the left over a red checkered background",
    "a small black square slides to the right over an orange background",
    "a purple triangle grows over a yellow gradient background",
    "a large orange star moves up over a blue dotted background",
    "a green ball bounces up and down over a white floor",
    "a yellow ring moves in a circle over a purple striped background",
    "a small red cross spins in place over a black checkered background",
    "a blue square falls down over a green gradient background",
    "a large purple star shrinks over a white floor",
    "a white triangle rolls to the right over a red background",
    "a black ball swings from side to side over a yellow dotted background",
    "a small green star moves to the left and a large red square grows over a blue background",
    "an orange ring slides to the left over a green floor",
    "a large yellow ball moves up over a black gradient background",
    "a blue triangle spins in place over an orange striped background",
    "a white cross falls down over a purple background",
    "a small purple square moves in a circle over a white dotted background",
    "a large red ring rolls to the right over a yellow background",
    "a black star grows over a green checkered background",
    "an orange cross slides to the right behind a large blue ball over a white floor",
    "a small yellow square bounces up and down over a red floor",
    "a large green triangle moves to the left over a purple gradient background",
    "a white ball spins in place and a small orange star falls down over a black background",
    "a red triangle shrinks over a blue striped background",
    "a large blue ring swings from side to side over a white checkered background",
    "a purple cross moves up over a yellow floor",
    "a small white star rolls to the left over an orange dotted background",
]

# tests/quality/video.csv (entropy, hilbert, pooled), mean over the 16 clips: what the simulation must reproduce with
# "base" at the work that the budgets 0.5, 0.3 and 0.2 cost
PUBLISHED = {0.698: 41.15, 0.569: 34.55, 0.503: 30.65}
