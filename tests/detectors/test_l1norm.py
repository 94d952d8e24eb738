from ood_toolkit.detectors import L1NormDetector


def test_it_is_the_other_tool_s_norm_with_the_paper_s_direction(golden):
    detector = L1NormDetector()
    # that tool calls a large norm OOD; GradNorm's paper, where the norm comes from, a small one
    golden.check("detectors/L1Norm", detector(golden.outputs("id")), detector(golden.outputs("ood")), scale=-1.0)
