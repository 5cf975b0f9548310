/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
 * Empty on purpose: bcc includes it by name and brings the contents itself. */
