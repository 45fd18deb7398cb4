"""Pages to look at: what the planner found, and what a sweep measured, each in one file that needs no network.

A page is made of a few pieces (:mod:`~lightning_par.reports.pieces`: bars, tables, facts), which templates turn into
HTML. Bars are boxes as wide as their share, so that the page's own style, its dark colours and a narrow screen apply to
them; curves are drawn by uPlot, which lies in ``static``.
"""
