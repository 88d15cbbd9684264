"""Exams: a fault planted in a run, the files that its tools would have left, a sealed answer, and a grade.

Whoever answers, a person or a program, has the files alone; the answer is kept beside them, encoded and with its
digest.
"""

from __future__ import annotations

from clustersim.studies.exam.drawing import DIFFICULTIES, PlantedIncident, planted
from clustersim.studies.exam.evidence import write_traces
from clustersim.studies.exam.grading import ExamGrade, graded
from clustersim.studies.exam.sealing import ExamAnswer, opened, sealed
from clustersim.studies.exam.writing import write_exam

__all__ = [
    "DIFFICULTIES",
    "ExamAnswer",
    "ExamGrade",
    "PlantedIncident",
    "graded",
    "opened",
    "planted",
    "sealed",
    "write_exam",
    "write_traces",
]
