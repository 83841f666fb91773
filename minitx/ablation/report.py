from dataclasses import dataclass


@dataclass
class W:
    sentences: list
    page: object


def write_report(findings, folder, *, meta):
    return W([], folder)
