/* sp_shim.cc - see sp_shim.h. The only file in C++.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/text/sp_shim.h"

#include <cstdio>
#include <new>
#include <string>
#include <vector>
#include <sentencepiece_processor.h>

struct esa_sp {
    sentencepiece::SentencePieceProcessor processor;
};

extern "C" int32_t esa_sp_open(esa_sp **sp, const void *bytes, size_t size, char *why,
                               size_t why_size)
{
    esa_sp *made = nullptr;
    *sp = nullptr;
    std::snprintf(why, why_size, "it could not be loaded");
    try {
        made = new esa_sp;
        const auto status = made->processor.LoadFromSerializedProto(
            { static_cast<const char *>(bytes), size });
        if (status.ok() && made->processor.GetPieceSize() > 0) {
            *sp = made;
            return 0;
        }
        if (!status.ok()) std::snprintf(why, why_size, "%s", status.ToString().c_str());
    } catch (const std::bad_alloc &) {
        std::snprintf(why, why_size, "out of memory");
    } catch (...) {
    }
    delete made;
    return -1;
}

extern "C" void esa_sp_close(esa_sp *sp) { delete sp; }

extern "C" int32_t esa_sp_size(const esa_sp *sp) { return sp->processor.GetPieceSize(); }

extern "C" int32_t esa_sp_find(const esa_sp *sp, const char *piece)
{
    try {
        const int id = sp->processor.PieceToId(piece);
        /* unknown pieces get the id of <unk> */
        return sp->processor.IdToPiece(id) == piece ? id : -1;
    } catch (...) {
        return -1;
    }
}

extern "C" int32_t esa_sp_encode(const esa_sp *sp, const char *text, size_t bytes,
                                 void (*put)(void *user, int32_t id), void *user)
{
    try {
        std::vector<int> ids;
        if (!sp->processor.Encode({text, bytes}, &ids).ok()) return -1;
        const int unknown = sp->processor.unk_id();
        bool bytes_before = false;
        for (const int id : ids) {
            const bool is_byte = sp->processor.IsByte(id);
            if (!is_byte || !bytes_before) put(user, is_byte ? unknown : id);
            bytes_before = is_byte;
        }
        return 0;
    } catch (...) {
        return -1;
    }
}
